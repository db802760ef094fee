"""Which backend and device each rank gets, and what the doctor says of a sick machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_helpers import RankError, devices, launch
from ddp_helpers.devices import Check, check, doctor, pick, plan, visible_gpus

GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
CPU = ("gloo", torch.device("cpu"))
Set = Callable[..., None]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the variables that matter out of the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Return a function that pretends a number of GPUs, nccl, and variables of the environment."""

    def pretend(gpus: int = 0, nccl: bool = True, **environ: object) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))

    return pretend


# pick


def test_the_device_comes_from_the_local_rank(machine: Set) -> None:
    machine(gpus=4, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert pick() == ("nccl", torch.device("cuda", 1))
    machine(gpus=2, RANK=5, LOCAL_RANK=1)
    del os.environ["LOCAL_WORLD_SIZE"]
    assert pick() == ("nccl", torch.device("cuda", 1))


def test_a_process_that_is_no_rank_is_local_rank_0_of_1(machine: Set) -> None:
    machine(gpus=0)
    assert pick() == CPU
    machine(gpus=1)
    assert pick() == ("nccl", torch.device("cuda", 0))


@pytest.mark.parametrize("gpus", range(5))
@pytest.mark.parametrize("size", range(1, 6))
def test_all_ranks_of_a_node_agree_and_share_no_gpu(machine: Set, gpus: int, size: int) -> None:
    machine(gpus=gpus, LOCAL_WORLD_SIZE=size)
    got = [pick(rank) for rank in range(size)]
    if size <= gpus:
        assert got == [("nccl", torch.device("cuda", rank)) for rank in range(size)]
    else:
        assert got == [CPU] * size  # all of them: no mixture, and no rank fewer


def test_arguments_come_before_the_environment(machine: Set) -> None:
    machine(gpus=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    assert pick(1, 2) == ("nccl", torch.device("cuda", 1))
    assert pick(0, 3) == CPU
    assert pick(local_world_size=2) == ("nccl", torch.device("cuda", 0))


def test_gpus_without_nccl_are_not_taken(machine: Set) -> None:
    machine(gpus=4, nccl=False)
    assert visible_gpus() == 0 and pick(1, 2) == CPU


@pytest.mark.parametrize(("visible", "gpus"), [(None, 4), ("2,3", 2), ("0", 1), ("", 0), ("-1", 0), ("1,9", 1)])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int) -> None:
    """Four GPUs in the machine: torch itself applies CUDA_VISIBLE_DEVICES."""
    if not hasattr(torch.cuda, "_raw_device_count_nvml") or torch.cuda.is_initialized() or torch.version.hip:
        pytest.skip("this torch counts GPUs in another way")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus
    assert [pick(rank, 2)[0] for rank in range(2)] == ["nccl" if gpus >= 2 else "gloo"] * 2


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (5, 4)])
def test_an_impossible_local_rank_is_refused(machine: Set, rank: int, size: int) -> None:
    machine(gpus=8)
    with pytest.raises(ValueError, match=rf"Local rank {rank} of {size} .* Set LOCAL_RANK and LOCAL_WORLD_SIZE"):
        pick(rank, size)


def test_a_rank_that_cannot_know_the_others_choice_is_refused(machine: Set) -> None:
    machine(gpus=1, LOCAL_RANK=1)  # local rank 0 takes nccl here
    with pytest.raises(ValueError, match=r"Local rank 1 of an unknown number .* Set LOCAL_RANK and LOCAL_WORLD_SIZE"):
        pick()
    machine(gpus=0, LOCAL_RANK=1)  # nobody takes nccl here
    assert pick() == CPU


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(machine: Set, name: str) -> None:
    machine(**{name: "1x"})
    with pytest.raises(ValueError, match=f"{name} is '1x', not a number: unset it"):
        pick()


def test_live_ranks_pick_alike() -> None:
    def local_rank_is_read(rank: int) -> tuple[Any, Any]:
        return pick(), pick(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))

    for rank, (read, given) in enumerate(launch(local_rank_is_read)):
        assert read == given == (("nccl", torch.device("cuda", rank)) if GPUS >= 2 else CPU)


# plan


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_plans_are_what_pick_does(machine: Set, gpus: int) -> None:
    machine(gpus=gpus)
    for one in plan(gpus):
        got = [pick(rank, one.ranks) for rank in range(one.ranks)]
        assert got == [(one.backend, torch.device(device)) for device in one.devices]


def test_the_plans_for_0_1_and_n_gpus() -> None:
    def short(gpus: int) -> list[tuple[int, str]]:
        return [(one.ranks, one.backend) for one in plan(gpus)]

    assert short(0) == [(2, "gloo")]
    assert short(1) == [(2, "gloo"), (1, "nccl")]
    assert short(2) == [(2, "nccl")] and short(8) == [(8, "nccl")]
    assert "nccl refuses two ranks on one GPU" in plan(1)[0].why
    assert [str(one) for one in plan(8)] == [f"8 ranks, nccl, cuda:0 to cuda:7: {plan(8)[0].why}"]
    assert [str(one).split(":")[0] for one in plan(1)] == ["2 ranks, gloo, cpu", "1 rank, nccl, cuda"]
    assert all(one.why.endswith(".") for gpus in range(4) for one in plan(gpus))
    with pytest.raises(ValueError, match="-1 GPUs: give 0 or more"):
        plan(-1)


# The doctor, on sick machines


def found(name: str) -> Check:
    """Return the one line of that name."""
    (line,) = [line for line in check() if line.name == name]
    return line


def healthy(name: str) -> bool:
    """Whether the line is there without advice."""
    line = found(name)
    return line.ok and line.advice == ""


REAL = socket.getaddrinfo


def name_server(patch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> None:
    """Call this machine lonely, and let the name server answer so when asked for that name."""
    patch.setattr(socket, "gethostname", lambda: "lonely")
    patch.setattr(socket, "getaddrinfo", lambda *asked: answer() if asked[0] == "lonely" else REAL(*asked))


@pytest.fixture
def well(machine: Set, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend what a test runner may lack: no GPU, 4 cores, much shared memory and disk, a name."""
    machine(gpus=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.shutil, "which", lambda program: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(devices, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(devices, "SHM", tmp_path)
    monkeypatch.setattr(devices.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 10**12))
    name_server(monkeypatch, lambda: [])


def fail(error: type[Exception]) -> Callable[..., Any]:
    def raises(*args: object, **options: object) -> Any:
        raise error("pretended")

    return raises


def test_a_healthy_machine_needs_nothing(well: None) -> None:
    checks = check()
    assert [c.name for c in checks if not c.ok or c.advice] == []
    assert len({c.name for c in checks}) == len(checks) >= 15 and all(c.value for c in checks)


def python_39(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(devices, "sys", SimpleNamespace(version_info=(3, 9, 18), platform="linux"))


def old_torch(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(torch, "__version__", "2.8.1+cpu")


def version(name: str, text: str | None) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a change after which the package has another version, or is missing."""

    def change(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        real = devices.importlib.metadata.version

        def pretended(asked: str) -> str:
            if asked == name and text is None:
                raise PackageNotFoundError(name)
            return str(text) if asked == name else real(asked)

        patch.setattr(devices.importlib.metadata, "version", pretended)

    return change


def torchvision_of_another_torch(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(devices.importlib.metadata, "requires", lambda name: ["numpy", "torch==2.10.0"])


def no_gloo(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(dist, "is_gloo_available", lambda: False)


def gpus_without_nccl(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(dist, "is_nccl_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 2)


def driver(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(devices.shutil, "which", {"nvidia-smi": "/usr/bin/nvidia-smi"}.get)
    patch.setattr(torch.version, "cuda", "13.0")


def hidden_gpus(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(patch, tmp_path)
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


def cpu_build(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(patch, tmp_path)
    patch.setattr(torch.version, "cuda", None)


def cores(count: int, allowed: str = "") -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a change after which the process may use so many cores, under a container's quota."""

    def change(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        patch.setattr(os, "sched_getaffinity", lambda process: set(range(count)), raising=False)
        if allowed:
            (tmp_path / "cpu.max").write_text(f"{allowed}\n")

    return change


def threads(text: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a change after which the user has set OMP_NUM_THREADS."""
    return lambda patch, tmp_path: patch.setenv("OMP_NUM_THREADS", text)


def free(folder: Callable[[Path], str], count: int) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a change after which one folder has so many bytes free."""

    def change(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def usage(asked: str | Path) -> Usage:
            return Usage(10**12, 0, count if str(asked) == folder(tmp_path) else 10**12)

        patch.setattr(devices.shutil, "disk_usage", usage)

    return change


def no_folder(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(devices.tempfile, "gettempdir", fail(FileNotFoundError))


def nameless(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name_server(patch, fail(socket.gaierror))


def odd_name(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name_server(patch, fail(UnicodeError))


def no_loopback(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])


def firewall(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(socket, "create_connection", fail(TimeoutError))


def no_libuv(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(dist, "TCPStore", fail(RuntimeError))


SICK: list[tuple[Any, str, str, str]] = [  # what is wrong, the line that tells, its value, its advice
    (python_39, "Python", "3.9.18", "Python 3.10 or newer"),
    (old_torch, "torch", "2.8.1+cpu", "pip install --upgrade 'torch>=2.9'"),
    (version("torchvision", "0.23.0"), "torchvision", "0.23.0", "pip install --upgrade 'torchvision>=0.24'"),
    (torchvision_of_another_torch, "torchvision", "0.", "built for torch 2.10.0: run pip install"),
    (version("jupyterlab", None), "jupyterlab", "missing", "pip install --upgrade 'jupyterlab>=4.2'"),
    (version("matplotlib", "3.7"), "matplotlib", "3.7", "pip install --upgrade 'matplotlib>=3.8'"),
    (version("nbval", None), "nbval", "missing", "pip install --upgrade 'nbval>=0.11'"),
    (version("cloudpickle", None), "cloudpickle", "missing", "pip install --upgrade 'cloudpickle>=3.0'"),
    (no_gloo, "gloo", "missing", "this torch lacks it: run pip install"),
    (gpus_without_nccl, "nccl", "missing", "install torch's CUDA build for Linux"),
    (driver, "GPUs", "none", "run nvidia-smi, and update the driver"),
    (hidden_gpus, "GPUs", "none", "CUDA_VISIBLE_DEVICES='' leaves no GPU"),
    (cpu_build, "GPUs", "none", "install the CUDA build"),
    (cores(1), "cores", "1", "share one core"),
    (cores(64, "100000 100000"), "cores", "64, 1 allowed by the container", "share one core"),
    (cores(64, "400000 100000"), "threads per rank", "32", "Set OMP_NUM_THREADS=2 before"),
    (threads("64"), "threads per rank", "64", "Set OMP_NUM_THREADS=2 before"),
    (threads("two"), "threads per rank", "two", "Set OMP_NUM_THREADS=2 before"),
    (threads("0"), "threads per rank", "0", "Set OMP_NUM_THREADS=2 before"),
    (free(str, 64_000_000), "shared memory", "64 MB free", "--shm-size=1g"),
    (free(lambda _: os.getcwd(), 10_000_000), "disk", "10 MB free", "Free 500 MB"),
    (free(lambda _: devices.tempfile.gettempdir(), 10_000_000), "disk", "10 MB free", "Free 500 MB"),
    (no_folder, "disk", "0 MB free", "Free 500 MB"),
    (nameless, "hostname", "unknown", "Add the line '127.0.0.1 lonely' to /etc/hosts"),
    (odd_name, "hostname", "unknown", "Add the line '127.0.0.1 lonely' to /etc/hosts"),
    (no_loopback, "loopback", "unreachable", "bring that interface up"),
    (firewall, "loopback", "unreachable", "let no firewall block it"),
    (no_libuv, "libuv", "missing", "needs libuv, and this torch lacks it: run pip install"),
]


@pytest.mark.parametrize(("change", "name", "value", "advice"), SICK)
def test_a_sick_machine_gets_advice(
    well: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pytest.MonkeyPatch, Path], None],
    name: str,
    value: str,
    advice: str,
) -> None:
    assert healthy(name)
    change(monkeypatch, tmp_path)
    line = found(name)
    assert not line.ok and line.value.startswith(value) and advice in line.advice and line.advice.endswith(".")
    doctor()
    (shown,) = [shown for shown in capsys.readouterr().out.split("\n") if shown.split("  ")[0] == name]
    assert shown.endswith(f"  ! {line.advice}")


def test_every_line_can_fail(well: None) -> None:
    assert {name for _, name, _, _ in SICK} == {line.name for line in check()}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (cores(64, "max 100000"), "threads per rank"),
        (cores(2), "cores"),
        (cores(1), "threads per rank"),  # one thread for each of two ranks is the least there is
        (threads("1"), "threads per rank"),
        (threads(""), "threads per rank"),
        (free(str, 256_000_000), "shared memory"),
        (lambda patch, tmp_path: patch.setattr(devices, "SHM", tmp_path / "none"), "shared memory"),
        (lambda patch, tmp_path: patch.setattr(torch, "__version__", "2.9.0a0+git123"), "torch"),
        (lambda patch, tmp_path: patch.setattr(dist, "is_nccl_available", lambda: False), "nccl"),
        (lambda patch, tmp_path: patch.setenv("CUDA_VISIBLE_DEVICES", ""), "GPUs"),  # there is none to hide
    ],
)
def test_what_is_only_unusual_needs_nothing(
    well: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[pytest.MonkeyPatch, Path], None],
    name: str,
) -> None:
    change(monkeypatch, tmp_path)
    assert healthy(name)


def test_the_limit_on_threads_heals_a_container(well: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores(64, "400000 100000")(monkeypatch, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what the advice says
    assert healthy("threads per rank") and found("cores").value == "64, 4 allowed by the container"
    cores(2, "400000 100000")(monkeypatch, tmp_path)
    assert found("cores").value == "2"  # more is allowed than this process may use


def test_without_a_loopback_interface_libuv_is_not_blamed(well: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", fail(OSError))
    names = [line.name for line in check()]
    assert "loopback" in names and "libuv" not in names


def test_a_name_server_that_is_down_costs_two_seconds(well: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name_server(monkeypatch, lambda: time.sleep(60))
    assert not found("hostname").ok  # and pytest ends before the minute is over


def test_threads_and_table_follow_the_plan(
    well: None, machine: Set, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(gpus=4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert found("threads per rank").value == "8" and found("GPUs").value == "4 visible"
    doctor()
    table, _, plans = capsys.readouterr().out.partition("\n\n")
    assert plans == f"The plan for 4 GPUs:\n  {plan(4)[0]}\n"
    assert len({line.index("  ok") for line in table.split("\n")}) == 1  # aligned, and all well


def test_the_least_versions_are_those_of_the_package() -> None:
    pins = {pin for pin in requires("ddp-notebooks") or [] if "extra" not in pin}
    assert pins == {f"{name}>={least}" for name, least in devices.PACKAGES.items()} | {"torch>=2.9"}


def test_the_check_leaves_nothing_behind() -> None:
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("this system does not list open files")
    check()
    before = len(list(fds.iterdir()))
    for _ in range(3):
        check()
    assert len(list(fds.iterdir())) == before and not torch.cuda.is_initialized()


@pytest.mark.parametrize("command", [["-m", "ddp_helpers.devices"], [devices.__file__]])
def test_the_program_prints_the_table(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    table, _, plans = done.stdout.partition("\n\n")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split("  ")[0] for line in table.split("\n")] == [line.name for line in check()]
    assert plans == f"The plan for {GPUS} GPU{'s' * (GPUS != 1)}:\n" + "".join(f"  {one}\n" for one in plan(GPUS))


# With GPUs


def all_reduce_on_my_gpu(rank: int) -> tuple[str, int, float]:
    """Sum rank + 1 over the ranks with nccl; return the backend, the device's index and the sum."""
    backend, device = pick()
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device)
    x = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return backend, x.device.index, x.item()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU and nccl, and this machine has none")
def test_each_rank_gets_its_gpu() -> None:
    total = GPUS * (GPUS + 1) / 2
    assert launch(all_reduce_on_my_gpu, nprocs=GPUS) == [("nccl", rank, total) for rank in range(GPUS)]


def two_ranks_on_gpu_0(rank: int) -> str:
    """Return the message with which nccl refuses; gloo would be the plan here."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl", device_id=device)
        dist.all_reduce(torch.ones(1, device=device))
    except dist.DistBackendError as error:
        return str(error)
    return "accepted"


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU and nccl, and this machine has none")
def test_nccl_refuses_two_ranks_on_one_gpu() -> None:
    try:
        messages = launch(two_ranks_on_gpu_0)
    except RankError as error:
        messages = [str(error)]
    assert any("Duplicate GPU" in text or "using the same GPU" in text for text in messages)
