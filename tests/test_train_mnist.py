"""The program to take home and the two scripts: the same weights however the ranks are started."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ddp_helpers import devices, launch, train_mnist
from ddp_helpers.data import BatchedDataset, load_mnist, normalize, prepare_mnist
from ddp_helpers.models import MLP
from ddp_helpers.train_mnist import Config, cli, main

SCRIPTS = Path(__file__).parents[1] / "notebooks" / "scripts"
REPEAT = int(os.environ.get("DDP_REPEAT", "5"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PROGRAM = ["-m", "ddp_helpers.train_mnist"]
SHORT = Config(data="subset", epochs=1)


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights."""
    return max((one[name] - two[name]).abs().max().item() for name in one | two)


def by_hand(config: Config) -> dict[str, Tensor]:
    """Train in one process with the loop written out, and return the weights."""
    torch.manual_seed(config.seed)
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    train = load_mnist(prepare_mnist(False), train=True)
    sampler = DistributedSampler(train, num_replicas=1, rank=0, shuffle=True, seed=config.seed)
    loader = DataLoader(train, config.global_batch, sampler=sampler, collate_fn=BatchedDataset.collate)
    for epoch in range(1, config.epochs + 1):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def on_each_rank(r: int, done: Path) -> dict[str, Any]:
    """Run the program for one epoch; note whether the group existed each time that it prepared the data."""
    asked = []

    def prepare(full: bool | None = None) -> Path:
        asked.append(dist.is_initialized())
        if r == 0 and len(asked) == 1:
            time.sleep(1)
            done.touch()
        assert done.exists(), "this rank did not wait"
        return prepare_mnist(full)

    train_mnist.prepare_mnist = prepare
    return main(r, SHORT) | {"asked": asked, "group": dist.is_initialized()}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Return what one process ends with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr(devices, "pick", lambda: ("gloo", torch.device("cpu")))
        return main(0, SHORT)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Return what two ranks end with, and what they print."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        done = tmp_path_factory.mktemp("data") / "done"
        return launch(on_each_rank, (done,), nprocs=2, timeout=60), shown.getvalue()


def test_one_process_is_the_loop_by_hand(one: dict[str, Any]) -> None:
    assert apart(one["weights"], by_hand(SHORT)) == 0.0
    assert one["world_size"] == 1 and one["count"] == 1999 and one["accuracy"] == one["correct"] / 1999 > 0.85
    assert len(one["losses"]) == 1 and 0.3 < one["losses"][0] < 1.2


def test_two_ranks_end_with_the_weights_of_one_process(one: dict[str, Any], two: Any) -> None:
    first, second = two[0]
    assert first["world_size"] == 2 and first["fingerprint"] == second["fingerprint"]
    assert apart(first["weights"], second["weights"]) == 0.0
    assert apart(first["weights"], one["weights"]) < 1e-4
    assert first["losses"] == second["losses"] == [pytest.approx(one["losses"][0], abs=1e-5)]
    assert (first["correct"], first["count"]) == (second["correct"], second["count"])
    assert abs(first["correct"] - one["correct"]) <= 1 and first["count"] == 1999


def test_the_fingerprint_is_of_the_weights(one: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    for value in one["weights"].values():
        digest.update(value.numpy().tobytes())
    assert one["fingerprint"] == digest.hexdigest()[:16]


def test_local_rank_0_prepares_while_the_others_wait(two: Any) -> None:
    assert [r["asked"] for r in two[0]] == [[False, True], [True]]  # before the group exists, and after
    assert [r["group"] for r in two[0]] == [False, False]


def test_rank_0_alone_logs(two: Any) -> None:
    lines = [re.sub(r"\d\.\d+$", "…", re.sub(r"\d+/1999 \(\d\d\.\d\d%\)", "…", line)) for line in two[1].splitlines()]
    assert lines == [
        "[rank 0] Train Epoch: 1 [2560/6000 (43%)]  Loss: …",
        "[rank 0] Train Epoch: 1 [5120/6000 (85%)]  Loss: …",
        "[rank 0] Test accuracy: …, loss …",
    ]


def ends_with_a_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        cli(arguments)
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (["--global-batch", "255", "--nprocs", "2"], {}, "255 can't be split into 2 equal parts"),
        (["--global-batch", "0"], {}, "0 can't be split into 1 equal parts"),
        (["--nprocs", "0"], {}, "--nprocs is the number of ranks"),
        (["--global-batch", "10"], {"RANK": "1", "WORLD_SIZE": "4"}, "choose a multiple of the world size, 4"),
        (["--nprocs", "2"], {"RANK": "1", "WORLD_SIZE": "4"}, "this process is one already"),
        (["--model", "vit"], {}, "invalid choice: 'vit'"),
        (["--resume"], {}, "resume needs a checkpoint to go on from"),
        ([], {"DDP_MNIST": "half"}, "data is 'half' (from DDP_MNIST, perhaps): choose 'subset' or 'full'"),
    ],
)
def test_what_can_not_work_is_said_before_training(
    arguments: list[str],
    environ: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train_mnist, "prepare_mnist", lambda full: pytest.fail("too late"))
    assert says in ends_with_a_message(arguments, capsys)


def test_a_batch_that_can_not_be_shared_is_an_error_of_main_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="a global batch of 256 can't be split into 3 equal parts"):
        main(0, SHORT)


def test_options_reach_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train_mnist, "main", lambda *args: seen.append(args) or {"fingerprint": "abc"})
    monkeypatch.setenv("DDP_MNIST", "full")
    cli([])
    monkeypatch.setenv("DDP_MNIST", "")
    cli([])
    options = ["--data", "full", "--model", "cnn", "--epochs", "3", "--global-batch", "64", "--lr", "0.1"]
    cli([*options, "--seed", "5", "--log-every", "7", "--checkpoint", "run.pt", "--resume"])
    assert seen == [
        (0, Config("full", "mlp", 10, 256, 1e-3, 0)),
        (0, Config("subset", "mlp", 10, 256, 1e-3, 0)),
        (0, Config("full", "cnn", 3, 64, 0.1, 5, 7, "run.pt", True)),
    ]
    assert capsys.readouterr().out.splitlines() == ["fingerprint: abc"] * 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cli([])
    assert seen[-1][0] == 1 and capsys.readouterr().out == ""


def without_tensors(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "weights"}


def test_a_resumed_run_ends_as_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(devices, "pick", lambda: ("gloo", torch.device("cpu")))
    path, run = str(tmp_path / "run.pt"), Config(data="subset", epochs=2, global_batch=2000, log_every=0)
    undisturbed = main(0, run)
    main(0, replace(run, epochs=1, checkpoint=path, resume=True))  # there is no file yet
    capsys.readouterr()
    resumed = main(0, replace(run, log_every=3, checkpoint=path, resume=True))
    lines = capsys.readouterr().out.splitlines()
    assert without_tensors(resumed) == without_tensors(undisturbed)
    assert lines[0] == f"{path}: epoch 2 comes next"
    assert {line.split(" [")[0] for line in lines[1:-1]} == {"Train Epoch: 2"}
    again = main(0, replace(run, checkpoint=path, resume=True))
    assert without_tensors(again) == without_tensors(undisturbed)
    with pytest.raises(ValueError, match=r"run.pt is of another run: .*'lr': 0.001.* this one has .*'lr': 0.1"):
        main(0, replace(run, lr=0.1, checkpoint=path, resume=True))


def test_the_scripts_differ_in_about_a_dozen_lines() -> None:
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in ("one_device.py", "ddp.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert 8 <= len(changed) <= 16


def command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as from a shell: no rank, no GPU, one thread."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "DDP_MNIST")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_the_scripts_end_with_the_same_weights(tmp_path: Path) -> None:
    weights, outputs = [], []
    for start, name in (([sys.executable], "one_device.py"), (TORCHRUN, "ddp.py")):
        done = command([*start, str(SCRIPTS / name)], tmp_path)
        assert done.returncode == 0, done.stderr
        weights.append(torch.load(tmp_path / "mnist.pt", weights_only=True))
        outputs.append(re.fullmatch(r"accuracy: (0\.\d{4})\n", done.stdout))
        (tmp_path / "mnist.pt").unlink()
    assert apart(*weights) < 1e-4
    assert all(output and float(output[1]) > 0.9 for output in outputs)


@pytest.mark.slow
def test_launch_and_torchrun_end_with_the_same_weights(tmp_path: Path) -> None:
    ways = {
        "launch": [sys.executable, *PROGRAM, "--nprocs", "2"],
        "torchrun": [*TORCHRUN, *PROGRAM],
    }
    ends = {}
    for way, arguments in ways.items():
        done = command([*arguments, "--epochs", "2"], tmp_path)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.replace("[rank 0] ", "").splitlines()
        assert sum(line.startswith("Train Epoch: ") for line in lines) == 4
        assert re.fullmatch("fingerprint: [0-9a-f]{16}", lines[-1])
        ends[way] = lines
    assert ends["launch"] == ends["torchrun"]


@pytest.mark.slow
def test_a_killed_run_that_is_started_again_has_the_same_fingerprint(tmp_path: Path) -> None:
    arguments = [sys.executable, *PROGRAM, "--nprocs", "2", "--epochs", "6", "--log-every", "1"]
    undisturbed = command(arguments, tmp_path)
    arguments += ["--checkpoint", "run.pt", "--resume"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "DDP_MNIST")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout
        for line in run.stdout:
            if "Train Epoch: 4 [" in line:  # in the middle of an epoch
                run.kill()
    assert run.returncode == -signal.SIGKILL and (tmp_path / "run.pt.previous").exists()
    time.sleep(5)  # until the ranks have noticed
    resumed = command(arguments, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "run.pt: epoch 4 comes next" in resumed.stdout and "Train Epoch: 3" not in resumed.stdout
    assert resumed.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]


@pytest.mark.slow
def test_torchrun_ends_with_status_0_each_time(tmp_path: Path) -> None:
    ends = [command([*TORCHRUN, *PROGRAM, "--epochs", "1"], tmp_path) for _ in range(REPEAT)]
    assert [end.returncode for end in ends] == [0] * REPEAT, next(end.stderr for end in ends if end.returncode)
    assert len({end.stdout for end in ends}) == 1


def in_float64(r: int, config: Config) -> dict[str, Any]:
    """Run the program in double precision, where rounding can't hide a difference in the maths."""

    def load(root: Path, train: bool) -> BatchedDataset:
        data = load_mnist(root, train)
        return BatchedDataset(data.images, data.labels, lambda images: normalize(images).double())

    train_mnist.load_mnist, train_mnist.MLP = load, lambda: MLP().double()
    return main(r, config)


@pytest.mark.slow
def test_five_epochs_are_the_same_maths_on_one_rank_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32 the two drift apart from the fourth epoch on, as two single processes do whose initial weights differ
    # by 1e-7: a unit at the edge of its ReLU, and Adam, which makes full steps of small gradients.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = Config(data="subset", epochs=5, log_every=0)
    one, two = (launch(in_float64, (config,), nprocs=n)[0] for n in (1, 2))
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert next(iter(two["weights"].values())).dtype == torch.float64
    assert apart(one["weights"], two["weights"]) < 1e-10
    assert one["correct"] == two["correct"] > 0.9 * 1999
