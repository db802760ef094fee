"""Which backend and device each rank gets, and a doctor for this machine (needs torch alone; copy this file).

`python -m ddp_helpers.devices` prints the doctor's table; `python ddp_helpers/devices.py` does without the package.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

PACKAGES = {"torchvision": "0.24", "jupyterlab": "4.2", "matplotlib": "3.8", "nbval": "0.11", "cloudpickle": "3.0"}
SHARED_MEMORY, DISK = 256_000_000, 500_000_000  # bytes free; a container's default is 64 MB, full MNIST takes 120 MB
SHM, CPU_MAX = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max")
REINSTALL = "pip install --upgrade 'torch>=2.9' torchvision"
THERE = {True: "available", False: "missing"}


def pick(local_rank: int | None = None, local_world_size: int | None = None) -> tuple[str, torch.device]:
    """Return this rank's backend and device: nccl and cuda:local_rank, or gloo and the CPU.

    Any rank may call it, with or without a process group. nccl takes a visible GPU for each rank of the node; where
    there are fewer, all ranks of the node get gloo on the CPU: never are there fewer ranks. None reads LOCAL_RANK and
    LOCAL_WORLD_SIZE, 0 and 1 where missing. Raises ValueError for a local rank that can't be.
    """
    rank = _environ("LOCAL_RANK", 0) if local_rank is None else local_rank
    known = local_world_size is not None or "LOCAL_WORLD_SIZE" in os.environ
    size = _environ("LOCAL_WORLD_SIZE", rank + 1) if local_world_size is None else local_world_size
    gpus = visible_gpus()
    if not 0 <= rank < size or (not known and 0 < gpus <= rank):  # else rank 0 might take nccl and this one gloo
        raise ValueError(
            f"Local rank {rank} of {size if known else 'an unknown number'} can't choose a device: local ranks count "
            "from 0 on each node. Set LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does, or pass both"
        )
    return ("nccl", torch.device("cuda", rank)) if size <= gpus else ("gloo", torch.device("cpu"))


def visible_gpus() -> int:
    """Return how many GPUs nccl can use in this process; CUDA_VISIBLE_DEVICES counts. CUDA is not initialised."""
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


@dataclass(frozen=True)
class Plan:
    """How many ranks to start on a node, their backend, the device of each local rank, and why."""

    ranks: int
    backend: str
    devices: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        devices = " to ".join(dict.fromkeys((self.devices[0], self.devices[-1])))
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.backend}, {devices}: {self.why}"


def plan(gpus: int) -> list[Plan]:
    """Return what fits a node with this many GPUs, the recommended plan first. Raises ValueError below 0."""
    if gpus < 0:
        raise ValueError(f"A node can't have {gpus} GPUs: give 0 or more")
    if gpus > 1:
        devices = tuple(f"cuda:{i}" for i in range(gpus))
        return [Plan(gpus, "nccl", devices, "one rank for each GPU, and gradients go from GPU to GPU.")]
    why = "nccl refuses two ranks on one GPU" if gpus else "gloo needs no GPU"
    plans = [Plan(2, "gloo", ("cpu", "cpu"), f"{why}, and two ranks show what DDP does.")]
    return plans + [Plan(1, "nccl", ("cuda:0",), "the GPU's speed, but no other rank to talk to.")] * gpus


@dataclass(frozen=True)
class Check:
    """One line of the doctor: `advice` is a sentence that says what to do, empty where `ok`."""

    name: str
    value: str
    ok: bool
    advice: str = ""


def check() -> list[Check]:
    """Look at this machine and return a Check for each thing that the notebooks need; starts no rank."""
    found = [*_software(), *_hardware(), *_network()]
    return [Check(name, value, ok, "" if ok else advice) for name, value, ok, advice in found]


def doctor() -> None:
    """Print the checks as a table, with a sentence on each line that needs action, and the plan for this machine."""
    checks, gpus = check(), visible_gpus()
    name, value = max(len(c.name) for c in checks), max(len(c.value) for c in checks)
    for c in checks:
        print(f"{c.name:<{name}}  {c.value:<{value}}  {'ok' if c.ok else '! ' + c.advice}")
    print(f"\nThe plan for {gpus} GPU{'s' * (gpus != 1)}:", *(f"  {p}" for p in plan(gpus)), sep="\n")


def _software() -> Iterator[tuple[str, str, bool, str]]:
    python, version = ".".join(map(str, sys.version_info[:3])), str(torch.__version__)
    yield "Python", python, sys.version_info >= (3, 10), "Make a new environment with Python 3.10 or newer."
    yield "torch", version, _numbers(version) >= (2, 9), f"Run {REINSTALL}."
    for name, least in PACKAGES.items():
        found, needs = "", []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found, needs = importlib.metadata.version(name), importlib.metadata.requires(name) or []
        pins = [need[7:].split("+")[0] for need in needs if need.startswith("torch==")]
        good, advice = _numbers(found) >= _numbers(least), f"Run pip install --upgrade '{name}>={least}'."
        if pins and pins[0] != version.split("+")[0]:
            good, advice = False, f"It was built for torch {pins[0]}: run {REINSTALL}."
        yield name, found or "missing", good, advice


def _hardware() -> Iterator[tuple[str, str, bool, str]]:
    seen, hidden, driver = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"), shutil.which("nvidia-smi")
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    yield "gloo", THERE[gloo], gloo, f"The ranks talk through gloo on a CPU, and this torch lacks it: run {REINSTALL}."
    advice = "Without nccl the ranks use the CPU: to use the GPUs, install torch's CUDA build for Linux."
    yield "nccl", THERE[nccl], nccl or not seen, advice
    advice = "nvidia-smi is here, but torch sees no GPU: run nvidia-smi, and update the driver if it answers."
    if torch.version.cuda is None:
        advice = "This torch is built for the CPU: to use the GPU, install the CUDA build (pytorch.org/get-started)."
    elif hidden is not None:
        advice = f"CUDA_VISIBLE_DEVICES={hidden!r} leaves no GPU: to use them, unset it before you start Jupyter."
    yield "GPUs", f"{seen} visible" if seen else "none", bool(seen or not driver), advice

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = CPU_MAX.read_text().split() if CPU_MAX.is_file() else ["max"]
    may = cores if quota[0] == "max" else max(1, min(cores, int(quota[0]) // int(quota[1])))
    advice = "The ranks share one core: every notebook runs, but more ranks are never faster."
    yield "cores", f"{cores}" if may == cores else f"{cores}, {may} allowed by the container", may > 1, advice
    ranks = plan(visible_gpus())[0].ranks
    wish = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    fits = wish.isdecimal() and 0 < int(wish) <= max(1, may // ranks)
    advice = f"Set OMP_NUM_THREADS={max(1, may // ranks)} before you start Jupyter: {ranks} ranks share {may} core(s)."
    yield "threads per rank", wish, fits, advice

    free = shutil.disk_usage(SHM).free if SHM.is_dir() else SHARED_MEMORY  # macOS and Windows have no such folder
    advice = "DataLoader workers and nccl need more: start the container with --shm-size=1g."
    yield "shared memory", f"{free / 1e6:,.0f} MB free" if SHM.is_dir() else "on demand", free >= SHARED_MEMORY, advice
    free = 0
    with contextlib.suppress(OSError):  # where no folder can be written
        free = min(shutil.disk_usage(folder).free for folder in (tempfile.gettempdir(), os.getcwd()))
    advice = f"Free {DISK / 1e6:.0f} MB in the temporary and the current folder, for data and checkpoints."
    yield "disk", f"{free / 1e6:,.0f} MB free", free >= DISK, advice


def _network() -> Iterator[tuple[str, str, bool, str]]:
    name, found = socket.gethostname(), threading.Event()
    thread = threading.Thread(target=_look_up, args=(name, found), daemon=True)
    thread.start()
    thread.join(2.0)  # a name server that is down takes up to 30 s to fail
    known = found.is_set()
    advice = f"Add the line '127.0.0.1 {name}' to /etc/hosts: gloo looks it up unless GLOO_SOCKET_IFNAME is set."
    yield "hostname", "known" if known else "unknown", known, advice

    loopback = {"darwin": "lo0", "win32": ""}.get(sys.platform, "lo")
    there = libuv = False
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2.0).close()
        there = not loopback or loopback in [interface for _, interface in socket.if_nameindex()]
    advice = "The ranks meet at 127.0.0.1: bring that interface up (ip link set lo up), and let no firewall block it."
    yield "loopback", f"{loopback} 127.0.0.1".strip() if there else "unreachable", there, advice
    if there:
        with contextlib.suppress(AttributeError, OSError, RuntimeError), socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            host, port = own.getsockname()
            dist.TCPStore(host, port, 1, True, wait_for_workers=False, master_listen_fd=own.detach())
            libuv = True
        advice = f"The ranks meet at a store that needs libuv, and this torch lacks it: run {REINSTALL}."
        yield "libuv", THERE[libuv], libuv or sys.platform == "win32", advice


def _look_up(name: str, found: threading.Event) -> None:
    with contextlib.suppress(OSError, UnicodeError):
        socket.getaddrinfo(name, None)
        found.set()


def _environ(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}, not a number: unset it, or start the ranks with launch or torchrun")
    return int(value)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


if __name__ == "__main__":
    doctor()
