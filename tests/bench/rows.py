"""The rows of the table, in its order."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_helpers import Ranks, load_ipython_extension
from ddp_helpers.data import BatchedDataset, load_mnist, normalize, prepare_mnist
from ddp_helpers.models import MLP
from ddp_helpers.training import train_epoch

from . import Missing, Pair, Size, row, seconds
from .work import answer, nothing

ROOT = Path(__file__).parent.parent.parent
BATCH = 128
NO_IPYPARALLEL = "ipyparallel is not installed: pip install -e '.[bench]'"
IDLE_IMPORT = "import sys, torch._dynamo"  # what idle ranks import after 0.5 s: not in the middle of a measurement


def both(measure: Callable[[], tuple[float, float]]) -> Pair:
    """Make a Pair of a function that returns (ours, reference) at once."""
    last: list[float] = []

    def ours() -> float:
        last[:] = measure()
        return last[0]

    return Pair(ours, lambda: last[1])


# Starting and calling


def first_answer(nprocs: int) -> float:
    """Return the seconds from Ranks() until a first no-op has returned."""
    begin = time.perf_counter()
    with Ranks(nprocs) as ranks:
        ranks.run(nothing)
        return time.perf_counter() - begin


@row("two live ranks until a no-op returns / bare mp.spawn of two no-ops", limit=1.15)
def start(size: Size) -> Iterator[Pair]:
    yield Pair(
        lambda: first_answer(size.nprocs), lambda: seconds(torch.multiprocessing.spawn, nothing, (), size.nprocs)
    )


@row("two live ranks until a no-op returns / bare mp.spawn, its end not counted")
def start_alone(size: Size) -> Iterator[Pair]:
    def reference() -> float:
        pipes = [torch.multiprocessing.Pipe(duplex=False) for _ in range(size.nprocs)]
        begin = time.perf_counter()
        context = torch.multiprocessing.spawn(answer, ([end for _, end in pipes],), size.nprocs, join=False)
        for end, _ in pipes:
            end.recv()
        found = time.perf_counter() - begin
        while not context.join():
            pass
        return found

    yield Pair(lambda: first_answer(size.nprocs), reference)


@contextlib.contextmanager
def engines(size: Size) -> Iterator[Any]:
    """Start ipyparallel's engines and give a blocking view of all of them, or None where it is not installed."""
    try:
        import ipyparallel
    except ModuleNotFoundError as error:
        if error.name != "ipyparallel":
            raise
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = ipyparallel.Cluster(n=size.nprocs, profile_dir=folder, log_level=40)
        try:
            cluster.start_cluster_sync()
            with cluster.connect_client_sync() as client:
                client.wait_for_engines(size.nprocs, interactive=False)  # no progress bar
                view = client[:]
                view.block = True
                yield view
        finally:
            cluster.stop_cluster_sync()


@contextlib.contextmanager
def warm(size: Size) -> Iterator[Ranks]:
    """Give live ranks that have done their idle import and answered once."""
    with Ranks(size.nprocs) as ranks:
        ranks.execute(IDLE_IMPORT)
        ranks.run(nothing)
        yield ranks


def against_engines(size: Size, ours: Callable[..., Any], args: tuple, method: str, *sent: Any) -> Iterator[Pair]:
    """Yield `ours(*args)` against a call of the engines' view."""
    with engines(size) as view:
        reference = view and (lambda: seconds(getattr(view, method), *sent, calls=size.calls))
        yield Pair(lambda: seconds(ours, *args, calls=size.calls), reference, "" if view else NO_IPYPARALLEL)


@row("ranks.run of a no-op / ipyparallel apply", limit_ms=1)
def call(size: Size) -> Iterator[Pair]:
    with warm(size) as ranks:
        yield from against_engines(size, ranks.run, (nothing,), "apply", nothing)


@row("empty cell, ranks.execute / ipyparallel execute", limit_ms=5)
def cell(size: Size) -> Iterator[Pair]:
    with warm(size) as ranks:
        yield from against_engines(size, ranks.execute, ("",), "execute", "")


@contextlib.contextmanager
def notebook() -> Iterator[Any]:
    """Give an IPython shell in this process that knows %%ranks, and take back what it changed."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    except ImportError:
        raise Missing("IPython is not installed: pip install jupyterlab") from None
    if InteractiveShell.initialized():
        raise Missing("this process has an IPython shell already: run the benchmark from a terminal")
    prompts = {name: vars(sys)[name] for name in ("ps1", "ps2", "ps3") if hasattr(sys, name)}
    with tempfile.TemporaryDirectory() as folder:
        config = Config(HistoryManager={"enabled": False})
        namespace = types.ModuleType("notebook")  # otherwise the shell replaces __main__
        shell = InteractiveShell.instance(config=config, ipython_dir=folder, user_module=namespace)
        try:
            load_ipython_extension(shell)
            yield shell
        finally:
            InteractiveShell.clear_instance()
            sys.modules.pop("notebook", None)
            for name in ("ps1", "ps2", "ps3"):
                vars(sys).pop(name, None)
            vars(sys).update(prompts)


@row("empty %%ranks cell, IPython's part included / ipyparallel execute", limit_ms=5)
def magic(size: Size) -> Iterator[Pair]:
    with notebook() as shell, warm(size):
        yield from against_engines(size, shell.run_cell_magic, ("ranks", "", "\n"), "execute", "")


# An epoch, one process on one thread


@contextlib.contextmanager
def mnist(size: Size) -> Iterator[tuple[Path, BatchedDataset, str]]:
    """Give the root, the training set and a sentence that says which, with torch on one thread."""
    threads = torch.get_num_threads()
    full = bool(os.environ.get("DDP_MNIST_ROOT"))
    root = prepare_mnist(full)
    data = load_mnist(root, train=True)
    data = BatchedDataset(data.images[: size.images], data.labels[: size.images])
    which = "full MNIST" if full else "the embedded subset, because DDP_MNIST_ROOT is not set"
    torch.set_num_threads(1)
    try:
        yield root, data, f"{len(data):,} images ({which}), batches of {BATCH}, Adam, one thread"
    finally:
        torch.set_num_threads(threads)


def new() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the classic model with equal weights each time, and its optimizer."""
    torch.manual_seed(0)
    model = MLP()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def our_epoch(data: BatchedDataset) -> float:
    """Return the seconds of one epoch as the notebooks write it."""
    model, optimizer = new()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=BatchedDataset.collate)
    return seconds(lambda: train_epoch(model, loader, optimizer, 1, log_every=0))


@row("MLP epoch, our loader / bare loop over tensors", limit=1.25)
def epoch(size: Size) -> Iterator[Pair]:
    with mnist(size) as (_, data, note):
        images, labels = normalize(data.images), data.labels

        def bare() -> None:
            for index in torch.randperm(len(labels)).split(BATCH):
                optimizer.zero_grad()
                F.nll_loss(model(images[index]), labels[index]).backward()
                optimizer.step()

        def reference() -> float:
            nonlocal model, optimizer
            model, optimizer = new()
            return seconds(bare)

        model, optimizer = new()
        yield Pair(lambda: our_epoch(data), reference, note)


@row("MLP epoch, our loader / ToTensor and Normalize per item")
def epoch_per_item(size: Size) -> Iterator[Pair]:
    from torchvision import datasets, transforms

    with mnist(size) as (root, data, note):
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        items = Subset(datasets.MNIST(root, train=True, transform=transform), range(len(data)))
        loader = DataLoader(items, batch_size=BATCH, shuffle=True)

        def reference() -> float:
            model, optimizer = new()
            return seconds(lambda: train_epoch(model, loader, optimizer, 1, log_every=0))

        yield Pair(lambda: our_epoch(data), reference, note)


# Imports, and what is paid while ranks idle


@row("import ddp_helpers, after torch / import torch", limit_ms=60)
def imports(size: Size) -> Iterator[Pair]:
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import ddp_helpers; "
        "print(time.perf_counter() - b, b - a)"
    )

    def measure() -> tuple[float, float]:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        ours, reference = map(float, done.stdout.split())
        return ours, reference

    yield both(measure)


@row("first DDP(), ranks idle for 2.5 s before / right after the start")
def first_ddp(size: Size) -> Iterator[Pair]:
    def measure(idle: float) -> float:
        with Ranks(size.nprocs) as ranks:
            ranks.execute("import torch, torch.distributed as dist\ndist.init_process_group('gloo')")
            time.sleep(idle)
            return seconds(ranks.execute, "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))")

    yield Pair(lambda: measure(size.idle), lambda: measure(0.0))


def after(ranks: Ranks, idle: float) -> float:
    """Return the seconds of a no-op on ranks that have idled for `idle` seconds."""
    time.sleep(idle)
    return seconds(ranks.run, nothing)


@row("no-op, ranks idle for 0.2 s before / without")
def soon(size: Size) -> Iterator[Pair]:
    calls = min(size.calls, 5)
    with Ranks(size.nprocs) as ranks:
        ranks.run(nothing)
        yield Pair(
            lambda: statistics.median(after(ranks, 0.2) for _ in range(calls)),
            lambda: statistics.median(after(ranks, 0.0) for _ in range(calls)),
        )
        if any(ranks.pull("'torch._dynamo' in __import__('sys').modules")):
            raise Missing("The machine was so busy that the ranks idled for 0.5 s: measure again.")


@row("no-op, ranks idle for 0.6 s before, once after the start / without", limit_ms=600)
def later(size: Size) -> Iterator[Pair]:
    def measure() -> tuple[float, float]:
        with Ranks(size.nprocs) as ranks:
            ranks.run(nothing)
            reference = after(ranks, 0.0)
            return after(ranks, min(0.6, size.idle)), reference

    yield both(measure)
