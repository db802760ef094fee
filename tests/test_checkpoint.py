"""Checkpoints: resumed bit for bit, whole at every moment, and the same answer on every rank."""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_helpers import Ranks, checkpoint
from ddp_helpers.checkpoint import CheckpointError, Position, load_checkpoint, save_checkpoint
from ddp_helpers.process_group import assert_in_sync, checksum, rank, setup, teardown, world_size

REPEAT = int(os.environ.get("DDP_REPEAT", "100"))
EPOCHS, SAMPLES, BATCH = 3, 36, 4  # on two ranks 5 steps an epoch, the last one shorter


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are augmented with numbers from torch, Python and NumPy."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return torch.full((4,), index / SAMPLES) + 0.1 * noise, torch.tensor(index % 3)


class Crash(Exception):
    """What a test raises in the middle of a run."""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))


def train(
    path: Path | str,
    *,
    resume: bool = False,
    crash: tuple[int, int] | None = None,
    every: int = 2,
    epochs: int = EPOCHS,
    own_order: bool = False,
    workers: int = 0,
    seed: int = 0,
    after_step: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Train with momentum, a scheduler, shuffling, dropout and augmentation; say all that a run could differ in."""
    torch.set_num_threads(1)
    setup()
    model: nn.Module = network()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
    data = Noisy()
    if own_order:  # a sampler that draws its order from the global generator
        loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
    else:
        sampler: Any = DistributedSampler(data, num_replicas=world_size(), rank=rank(), seed=seed)
        loader = DataLoader(data, BATCH, sampler=sampler, num_workers=workers)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for seed_it in (torch.manual_seed, random.seed, np.random.seed):
        seed_it(100 * Path(path).exists() + rank())  # a resumed run must not depend on how it was seeded
    position = load_checkpoint(path, missing=Position(), **parts) if resume else Position()
    if (0, 0) < (position.epoch, position.step) < (epochs, 0):
        torch.rand(3)  # nor on what is drawn before it goes on
    losses, resumed = position.extra.setdefault("losses", []), (position.epoch, position.step)
    while position.epoch < epochs:
        for inputs, labels in position.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            after_step("backward")
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            after_step("step")
            if crash == (position.epoch, position.step):
                raise Crash
            if every and position.step % every == 0:
                save_checkpoint(path, position, **parts)
                after_step("save")
        save_checkpoint(path, position, **parts)
    found = {
        "losses": losses if rank() == 0 else None,  # extra is rank 0's
        "weights": checksum(model.parameters()),
        "buffers": checksum(model.buffers()) if rank() == 0 else None,  # the others get rank 0's in each forward
        "momentum": checksum(s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()),
        "rates": scheduler.get_last_lr(),
        "random": [torch.rand(2).tolist(), random.random(), float(np.random.rand())],
    }
    del model, optimizer, scheduler, parts
    teardown()
    return {"run": found, "resumed": resumed}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout=60) as live:
        yield live


def results(live: Ranks, path: Path, **options: Any) -> list[dict[str, Any]]:
    return live.run(lambda: train(path, **options))


def crashed(live: Ranks, path: Path, at: tuple[int, int], **options: Any) -> None:
    def run() -> bool:
        try:
            train(path, crash=at, **options)
        except Crash:
            dist.destroy_process_group()
            return True
        return False

    assert live.run(run) == [True, True]


def lost(folder: Path, name: str = "run.pt") -> None:
    for file in folder.glob(f"{name}*"):
        file.unlink()


# Bit for bit


@pytest.mark.parametrize(
    ("at", "options"),
    [
        ((0, 3), {}),
        ((1, 2), {}),
        ((1, 5), {}),
        ((2, 5), {}),
        ((1, 5), {"own_order": True}),
        ((1, 5), {"workers": 1}),
    ],
)
def test_a_run_that_crashed_ends_as_one_that_did_not(
    ranks: Ranks, tmp_path: Path, at: tuple[int, int], options: dict[str, Any]
) -> None:
    path = tmp_path / "run.pt"
    undisturbed = results(ranks, path, every=0, **options)
    lost(tmp_path)
    crashed(ranks, path, at, **options)
    resumed = results(ranks, path, resume=True, **options)
    assert [r["run"] for r in resumed] == [r["run"] for r in undisturbed]
    epoch, step = at
    assert [r["resumed"] for r in resumed] == [(epoch, (step - 1) // 2 * 2)] * 2  # saved after each second step
    assert len(undisturbed[0]["run"]["losses"]) == EPOCHS * (9 if "own_order" in options else 5)


def test_a_second_crash_and_a_resume_at_the_end_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    undisturbed = results(ranks, path, every=0)
    again = results(ranks, path, resume=True)
    assert [r["resumed"] for r in again] == [(EPOCHS, 0)] * 2
    assert [r["run"] for r in again] == [r["run"] for r in undisturbed]
    lost(tmp_path)
    crashed(ranks, path, (1, 3))
    crashed(ranks, path, (1, 5), resume=True)
    crashed(ranks, path, (1, 5), resume=True)
    resumed = results(ranks, path, resume=True)
    assert [r["run"] for r in resumed] == [r["run"] for r in undisturbed]


def test_each_epoch_has_an_order_of_its_own() -> None:
    sampler: Any = DistributedSampler(range(12), num_replicas=2, rank=1, seed=3)  # type: ignore[arg-type]
    loader: Any = DataLoader(range(12), 2, sampler=sampler)  # type: ignore[arg-type]
    position, found = Position(), []
    while position.epoch < 2:
        for batch in position.batches(loader):
            found.append((position.epoch, position.step, batch.tolist()))
    expected = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        expected += [(epoch, step, batch.tolist()) for step, batch in enumerate(loader, start=1)]
    assert found == expected and (position.epoch, position.step) == (2, 0)
    assert [batch for *_, batch in found[:3]] != [batch for *_, batch in found[3:]]


@pytest.mark.parametrize("left_out", ["momentum", "scheduler", "random", "start", "step"])
def test_each_thing_that_is_saved_is_needed(
    ranks: Ranks, tmp_path: Path, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    undisturbed = results(ranks, path, every=0)
    lost(tmp_path)
    crashed(ranks, path, (1, 3))
    content = torch.load(path, weights_only=True)
    position = content["position"]
    match left_out:
        case "momentum":
            content["optimizer"]["state"] = {}
        case "scheduler":
            content["scheduler"]["last_epoch"] += 1
        case "random":
            position["random"].reverse()  # each rank has its own
        case "start":
            for one in position["random"]:
                one["start"] = one["now"]
        case "step":
            position["step"] = 0
    torch.save(content, path)
    resumed = results(ranks, path, resume=True)
    same = [r["run"] for r in resumed] == [r["run"] for r in undisturbed]
    assert same == (left_out == "start")  # the start matters to workers and to samplers without a seed: see below


def test_the_start_of_an_epoch_is_needed_for_an_order_without_a_seed(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    undisturbed = results(ranks, path, every=0, own_order=True)
    lost(tmp_path)
    crashed(ranks, path, (1, 3), own_order=True)
    content = torch.load(path, weights_only=True)
    for one in content["position"]["random"]:
        one["start"] = one["now"]
    torch.save(content, path)
    resumed = results(ranks, path, resume=True, own_order=True)
    assert [r["run"] for r in resumed] != [r["run"] for r in undisturbed]


def test_one_process_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    threads, path = torch.get_num_threads(), tmp_path / "new" / "folder" / "run.pt"
    try:
        undisturbed = train(path, every=0)["run"]
        shutil.rmtree(path.parent)
        with pytest.raises(Crash):
            train(path, crash=(1, 6))
        resumed = train(path, resume=True)
    finally:
        torch.set_num_threads(threads)
    assert resumed == {"run": undisturbed, "resumed": (1, 4)}
    assert sorted(file.name for file in path.parent.iterdir()) == ["run.pt", "run.pt.previous"]


# Another world size


def test_another_world_size_fits_the_end_of_an_epoch_only(ranks: Ranks, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.pt"
    results(ranks, path, epochs=1, every=0)
    kept = path.read_bytes()
    with Ranks(3, timeout=60) as three:
        found = results(three, path, resume=True, every=0)
        assert [r["resumed"] for r in found] == [(1, 0)] * 3
        assert len({r["run"]["weights"] for r in found}) == 1
        assert len({str(r["run"]["random"]) for r in found}) == 3  # each rank starts anew with numbers of its own
        assert len(found[0]["run"]["losses"]) == 5 + 2 * 3  # 36 samples, 4 a step: 5 steps on 2 ranks, 3 on 3
        note = capsys.readouterr().out
        assert note == (
            f"[rank 0] Note: {path} was saved at world size 2, and this is world size 3: random numbers (dropout, "
            "augmentation) start anew.\n"
        )
        path.write_bytes(kept)
        again = results(three, path, resume=True, every=0)
        assert again == found
        lost(tmp_path)
        crashed(ranks, path, (1, 3))
        said = three.run(lambda: said_by(lambda: train(path, resume=True)))
    text = (
        f"{path} was saved at world size 2, and this is world size 3: in the middle of an epoch (epoch 1, step 2) only "
        "the old world size fits. Take a checkpoint of an epoch's end"
    )
    assert said == [text] * 3


def said_by(run: Callable[[], Any]) -> str:
    """Return what a CheckpointError says; for ranks, which must all say it."""
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_another_loader_is_refused_in_the_middle_of_an_epoch(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    crashed(ranks, path, (1, 3))
    first, second = ranks.run(lambda: said_by(lambda: train(path, resume=True, seed=7)))
    assert first == second
    assert "2 steps of epoch 1 used a loader with 5 batches, 18 samples, seed 0; this one has" in first
    assert "5 batches, 18 samples, seed 7" in first
    results(ranks, path, epochs=1, every=0)
    results(ranks, path, resume=True, seed=7)  # at the end of an epoch it fits


# Written whole, or not at all


class Tensors:
    """A part of a checkpoint: all that is asked of one is a state_dict."""

    def __init__(self, value: float, size: int = 1000) -> None:
        self.state = {"value": torch.full((size,), value)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def value_in(path: Path) -> float:
    part = Tensors(-1.0)
    load_checkpoint(path, part=part)
    return part.state["value"][0].item()


def save_and_die(path: str, at: str, share: float) -> None:
    """Save 2.0, and be killed on the way: after a share of the bytes, or just before or after a call of the system."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if at == "write":
        whole = io.BytesIO()
        torch_save = torch.save

        def save_a_part(content: Any, file: Any) -> None:
            torch_save(content, whole)
            file.write(whole.getvalue()[: int(share * len(whole.getvalue()))])
            file.flush()
            die()

        torch.save = save_a_part
    else:
        name, _, when = at.partition(" ")
        call = getattr(os, name)
        setattr(os, name, die if when == "before" else lambda *args: (call(*args), die()))
    save_checkpoint(path, Position(), part=Tensors(2.0))


ZYGOTE = multiprocessing.get_context("forkserver")
ZYGOTE.set_forkserver_preload(["torch", "torch._dynamo", "ddp_helpers", __name__])


def end_of(target: Callable[..., None], *args: Any) -> int | None:
    """Run a function in a process of its own; return how that ended."""
    process = ZYGOTE.Process(target=target, args=args)
    process.start()
    process.join(30)
    return process.exitcode


CALLS = [f"{name} {when}" for name in ("fsync", "link", "replace") for when in ("before", "after")]


def test_a_kill_during_the_save_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    draw, ends = random.Random(0), set()
    path = tmp_path / "run.pt"
    for at in [*CALLS, *["write"] * 6]:
        lost(tmp_path)
        save_checkpoint(path, Position(), part=Tensors(0.0))
        save_checkpoint(path, Position(), part=Tensors(1.0))
        assert end_of(save_and_die, str(path), at, draw.random()) == -signal.SIGKILL
        assert zipfile.ZipFile(path).testzip() is None
        found = value_in(path)
        assert found == (2.0 if at == "replace after" else 1.0), at
        ends.add(found)
        if at != "link before":  # then there is no previous one for a moment
            os.unlink(path)
            assert value_in(path) in (0.0, 1.0)
        save_checkpoint(path, Position(), part=Tensors(3.0))  # what was left over does not disturb the next one
        assert value_in(path) == 3.0
        assert {file.name for file in tmp_path.iterdir()} == {"run.pt", "run.pt.previous"}
    assert ends == {1.0, 2.0}


class Fuse:
    """Counts the moments of a run, calls of the system in a save included, and kills this rank at one of them."""

    def __init__(self, length: int | None) -> None:
        self.length, self.burnt = length, 0
        for name in ("fsync", "link", "replace"):
            call = getattr(os, name)
            setattr(os, name, lambda *args, call=call: (self.burn(), call(*args), self.burn()))

    def burn(self, *_: Any) -> None:
        self.burnt += 1
        if self.burnt == self.length:
            os.kill(os.getpid(), signal.SIGKILL)


def be_a_rank(r: int, folder: Path, resume: bool, length: int | None, link: Any) -> None:
    """Train as one of two ranks, until the fuse has burnt or to the end; send what came of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{resume}", rank=r, world_size=2)
    fuse = Fuse(length)
    with contextlib.suppress(RuntimeError):  # the other rank was killed
        link.send((train(folder / "run.pt", resume=resume, after_step=fuse.burn)["run"], fuse.burnt))
        os._exit(0)
    os._exit(1)


def two_ranks(folder: Path, resume: bool = False, lengths: tuple[int | None, int | None] = (None, None)) -> list[Any]:
    """Train on two processes; return for each what it sent, or how it ended."""
    folder.mkdir(exist_ok=True)
    pipes = [ZYGOTE.Pipe(duplex=False) for _ in lengths]
    processes = [
        ZYGOTE.Process(target=be_a_rank, args=(r, folder, resume, length, pipes[r][1]))
        for r, length in enumerate(lengths)
    ]
    for process in processes:
        process.start()
    for process, (_, end) in zip(processes, pipes, strict=True):
        end.close()
        process.join(60)
        assert process.exitcode is not None, "a rank hangs"
    return [
        home.recv() if process.exitcode == 0 else process.exitcode
        for process, (home, _) in zip(processes, pipes, strict=True)
    ]


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(tmp_path: Path) -> None:
    undisturbed = two_ranks(tmp_path / "undisturbed")
    moments = [count for _, count in undisturbed]
    assert moments[0] > moments[1] > 30  # rank 0 writes
    draw, wrong, resumed = random.Random(0), [], 0
    for point in range(REPEAT):
        folder, victim = tmp_path / str(point), draw.randrange(2)
        length = draw.randint(1, moments[victim])
        ends = two_ranks(folder, lengths=(length, None) if victim == 0 else (None, length))
        assert ends[victim] == -signal.SIGKILL
        resumed += (folder / "run.pt").exists()
        found = two_ranks(folder, resume=True)
        if [run for run, _ in found] != [run for run, _ in undisturbed]:
            wrong.append(f"rank {victim} killed at moment {length} of {moments[victim]}")
        shutil.rmtree(folder)
    assert not wrong and resumed > REPEAT * 0.8


def test_the_file_has_its_bytes_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("fsync", "link", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (done.append(name), call(*args)))
    save_checkpoint(tmp_path / "run.pt", Position(), part=Tensors(1.0))
    assert done == ["fsync", "replace", "fsync"]
    save_checkpoint(tmp_path / "run.pt", Position(), part=Tensors(1.0))
    assert done[3:] == ["fsync", "link", "replace", "fsync"]


def test_without_hard_links_the_previous_file_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    for value in (1.0, 2.0, 3.0):
        save_checkpoint(tmp_path / "run.pt", Position(), part=Tensors(value))
    assert (value_in(tmp_path / "run.pt"), value_in(tmp_path / "run.pt.previous")) == (3.0, 2.0)


def test_a_damaged_file_does_not_take_the_place_of_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for value in (1.0, 2.0):
        save_checkpoint(path, Position(), part=Tensors(value))
    path.write_bytes(path.read_bytes()[:-1])
    assert value_in(path) == 1.0
    save_checkpoint(path, Position(), part=Tensors(3.0))
    assert (value_in(path), value_in(tmp_path / "run.pt.previous")) == (3.0, 1.0)


def save_value(path: Path, value: float = 2.0, size: int = 1000) -> str:
    """Save on each rank, in a group; return what is said."""
    setup()
    return said_by(lambda: save_checkpoint(path, Position(), part=Tensors(value, size)))


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_old_file(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    ranks.run(lambda: save_value(path, 1.0))

    def on_a_full_disk() -> str:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            return save_value(path, 2.0, size=1_000_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert ranks.run(on_a_full_disk) == [f"{path} was not saved: File too large"] * 2
    assert value_in(path) == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]  # not even a part of the new one
    assert ranks.run(lambda: save_value(path, 3.0)) == ["nothing"] * 2 and value_in(path) == 3.0


def test_a_file_in_place_of_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    path = tmp_path / "folder" / "run.pt"
    first, second = ranks.run(lambda: save_value(path))
    assert first == second == f"{path} was not saved: File exists"
    path = tmp_path / "folder" / "deeper" / "run.pt"
    assert ranks.run(lambda: save_value(path)) == [f"{path} was not saved: Not a directory"] * 2


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root writes everywhere: test_a_file_in_place_of_the_folder does what it can")
    assert said_by(lambda: save_value(folder / "run.pt")).endswith("run.pt was not saved: Permission denied")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.0), "float64"),
        (Path("data"), "PosixPath"),
        (argparse.Namespace(lr=1), "Namespace"),
        (lambda: None, "function"),
        (range(3), "range"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: Any, kind: str) -> None:
    position = Position(extra={"best": [0, {"value": value}]})
    said = said_by(lambda: save_checkpoint(tmp_path / "run.pt", position, part=Tensors(1.0)))
    assert f"run.pt was not saved: position['extra']['best'][1]['value'] is a {kind}: store tensors" in said
    assert not list(tmp_path.iterdir())


def test_what_is_accepted_can_be_loaded(tmp_path: Path) -> None:
    extra = {
        "plain": ["text", b"bytes", 1, 0.5, 1j, True, None, (1, 2), {3}, {4: 5}],
        "torch": [torch.ones(2), torch.Size([3]), torch.float32, torch.device("cpu"), nn.Parameter(torch.ones(1))],
    }
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    rates = torch.optim.lr_scheduler
    parts = {
        f"scheduler{i}": scheduler
        for i, scheduler in enumerate(
            [
                rates.MultiStepLR(optimizer, [1, 2]),
                rates.OneCycleLR(optimizer, 0.1, 10),
                rates.CosineAnnealingWarmRestarts(optimizer, 3),
                rates.ReduceLROnPlateau(optimizer),
                rates.LambdaLR(optimizer, lambda step: 1.0),
                rates.SequentialLR(optimizer, [rates.ConstantLR(optimizer), rates.StepLR(optimizer, 1)], [2]),
            ]
        )
    }
    save_checkpoint(tmp_path / "run.pt", Position(extra=extra), optimizer=optimizer, **parts)
    found = load_checkpoint(tmp_path / "run.pt", optimizer=optimizer, **parts).extra
    assert found["plain"] == extra["plain"] and str(found["torch"]) == str(extra["torch"])


def test_ranks_at_different_steps_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    def save() -> str:
        setup()
        return said_by(lambda: save_checkpoint(tmp_path / "run.pt", Position(step=rank())))

    text = f"{tmp_path / 'run.pt'} was not saved: the ranks are not at the same (epoch, step): [(0, 0), (0, 1)]"
    assert ranks.run(save) == [text] * 2


# Read by rank 0, for all


def load_value(path: Path) -> tuple[str, float]:
    """Load on each rank; return what is said, and the value that is there in the end."""
    setup()
    part = Tensors(-1.0)
    said = said_by(lambda: load_checkpoint(path, part=part))
    return said, part.state["value"][0].item()


def test_a_file_that_only_rank_0_sees_is_loaded_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    folders[1].mkdir()
    save_checkpoint(folders[0] / "run.pt", Position(), part=Tensors(1.0))
    # A checkpoint of one process is loaded by two ranks: the end of an epoch.
    assert ranks.run(lambda: load_value(folders[int(os.environ["RANK"])] / "run.pt")) == [("nothing", 1.0)] * 2


def test_a_file_that_only_rank_1_sees_is_an_error_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "1" / "run.pt", Position(), part=Tensors(1.0))

    def load() -> tuple[str, float]:
        os.chdir(tmp_path / os.environ["RANK"])
        try:
            said, value = load_value(Path("run.pt"))
            assert said == said_by(lambda: load_checkpoint("run.pt", missing=Position()))  # no fresh start, either
            return said, value
        finally:
            os.chdir("/")

    (tmp_path / "0").mkdir()
    text = (
        "run.pt does not exist. run.pt.previous does not exist. Rank 0 reads it, and only these ranks can see it: [1]."
    )
    assert ranks.run(load) == [(text, -1.0)] * 2


def test_a_missing_file(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    text = f"{path} does not exist. {path}.previous does not exist."
    assert ranks.run(lambda: load_value(path)) == [(text, -1.0)] * 2
    start = Position(1)
    assert load_checkpoint(path, missing=start) is start
    path.write_bytes(b"")
    assert f"{path} is truncated or damaged" in said_by(lambda: load_checkpoint(path, missing=start))


@pytest.mark.parametrize("damage", ["empty", "half", "one byte less", "one bit", "zeros", "text"])
def test_a_damaged_file(ranks: Ranks, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.pt"
    save_checkpoint(path, Position(), part=Tensors(1.0))
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[good.index(torch.ones(50).numpy().tobytes()) + 100] ^= 1
    path.write_bytes(
        {
            "empty": b"",
            "half": good[: len(good) // 2],
            "one byte less": good[:-1],
            "one bit": bytes(flipped),
            "zeros": bytes(len(good)),
            "text": b"no checkpoint",
        }[damage]
    )
    text = f"{path} is truncated or damaged. {path}.previous does not exist."
    assert ranks.run(lambda: load_value(path)) == [(text, -1.0)] * 2
    path.with_name("run.pt.previous").write_bytes(good)
    assert ranks.run(lambda: load_value(path)) == [("nothing", 1.0)] * 2
    note = f"Note: {path} is truncated or damaged. Loaded {path}.previous."
    assert capsys.readouterr().out.startswith(f"[rank 0] {note}") and damage


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_a_file_that_would_run_code_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path, trace = tmp_path / "run.pt", tmp_path / "trace"
    torch.save({"part": Malicious(trace), "position": {}}, path)
    torch.load(path, weights_only=False)
    assert trace.exists()  # it would
    trace.unlink()
    text = (
        f"{path} can't be loaded: it refers to posix.system, which is neither tensor nor plain value, and could run "
        f"code. {path}.previous does not exist."
    )
    assert ranks.run(lambda: load_value(path)) == [(text, -1.0)] * 2
    assert not trace.exists()


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "run.pt")
    said = said_by(lambda: load_checkpoint(tmp_path / "run.pt"))
    assert "run.pt can't be loaded: save_checkpoint did not write it." in said


def test_a_reader_sees_whole_files_only(tmp_path: Path) -> None:
    path, stop = tmp_path / "run.pt", tmp_path / "stop"
    save_checkpoint(path, Position(), part=Tensors(0.0, 100_000))
    process = ZYGOTE.Process(target=read_until, args=(path, stop, tmp_path / "read"))
    process.start()
    for value in range(1, 26):
        save_checkpoint(path, Position(), part=Tensors(value, 100_000))
    stop.touch()
    process.join(30)
    reads, values = (int(word) for word in (tmp_path / "read").read_text().split())
    assert process.exitcode == 0 and reads >= values >= 2


def read_until(path: Path, stop: Path, report: Path) -> None:
    """Load a file again and again while it is replaced."""
    values = []
    while not stop.exists():
        value = torch.load(path, weights_only=True)["part"]["value"]
        assert (value == value[0]).all()
        values.append(value[0].item())
    report.write_text(f"{len(values)} {len(set(values))}")


# Any wrapper


class Genuine(nn.Module):
    """A model with a submodule that is really called module, and a compiled layer."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.layer: Any = torch.compile(nn.Linear(2, 2)) if compiled else nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.module(x))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": Genuine,
    "compiled": lambda: torch.compile(Genuine()),  # type: ignore[dict-item, return-value]
    "a compiled layer": lambda: Genuine(compiled=True),
    "wrapped": lambda: DistributedDataParallel(Genuine()),
    "compiled, wrapped": lambda: DistributedDataParallel(torch.compile(Genuine())),  # type: ignore[arg-type]
    "wrapped, compiled": lambda: torch.compile(DistributedDataParallel(Genuine())),  # type: ignore[dict-item, return-value]
    "wrapped with a compiled layer": lambda: DistributedDataParallel(Genuine(compiled=True)),
}
KEYS = ["module.weight", "module.bias", "layer.weight", "layer.bias"]


def test_any_form_of_a_model_saves_and_loads_the_same_keys(ranks: Ranks, tmp_path: Path) -> None:
    def save_and_load() -> dict[str, list[str]]:
        setup()
        found = {}
        for name, form in FORMS.items():
            torch.manual_seed(rank())
            model = form()
            save_checkpoint(tmp_path / name, Position(), model=model)
            for other in FORMS.values():
                torch.manual_seed(10 + rank())
                loaded = other()
                load_checkpoint(tmp_path / name, model=loaded)
                assert_in_sync(loaded)
                assert rank() or checksum(loaded.parameters()) == checksum(model.parameters())
            if rank() == 0:
                found[name] = list(torch.load(tmp_path / name, weights_only=True)["model"])
        del model, loaded
        teardown()
        return found

    assert ranks.run(save_and_load)[0] == dict.fromkeys(FORMS, KEYS)


def test_what_does_not_fit_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def save_and_load() -> list[str]:
        setup()
        save_checkpoint(path, Position(), model=nn.Linear(2, 2))
        larger = nn.Linear(2, 2 + rank())  # on rank 1 alone
        return [
            said_by(lambda: load_checkpoint(path, model=larger)),
            said_by(lambda: load_checkpoint(path, model=nn.BatchNorm1d(2))),
            said_by(lambda: load_checkpoint(path, net=nn.Linear(2, 2))),
        ]

    first, second = ranks.run(save_and_load)
    assert first == second
    assert f"{path} does not fit this run (rank 1): Error(s) in loading state_dict" in first[0]
    assert "size mismatch" in first[0] and "Missing key(s)" in first[1]
    assert first[2] == f"{path} does not fit this run (rank 0): it has no 'net', only model, position"


def test_it_is_loaded_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: (seen.append(options), load(*args, **options))[1])
    save_checkpoint(tmp_path / "run.pt", Position(), part=Tensors(1.0))
    value_in(tmp_path / "run.pt")
    assert seen == [{"map_location": "cpu", "weights_only": True}]


def test_a_file_from_another_gpu_is_loaded_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:99")
        save_checkpoint(tmp_path / "run.pt", Position(), part=Tensors(1.0))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "run.pt", weights_only=True)
    assert value_in(tmp_path / "run.pt") == 1.0


def test_copied_files_work_alone(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("checkpoint.py", "process_group.py"):
        shutil.copy(Path(checkpoint.__file__).with_name(name), package)
    code = (
        "import sys; from torch import nn; from mine.checkpoint import *\n"
        "save_checkpoint('run.pt', Position(3), model=nn.Linear(1, 1))\n"
        "print(load_checkpoint('run.pt', model=nn.Linear(1, 1)).epoch, 'ddp_helpers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "3 False\n", done.stderr
