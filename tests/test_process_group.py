"""The process-group helpers, without a group and on three ranks."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers import launch
from ddp_helpers.process_group import (
    all_ranks_ok,
    any_rank,
    assert_in_sync,
    checksum,
    rank,
    setup,
    teardown,
    unwrap,
    world_size,
)

WORLD = 3


def test_without_a_group_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    setup()
    assert (dist.is_initialized(), rank(), world_size()) == (False, 0, 1)
    assert [all_ranks_ok(True), all_ranks_ok(False), any_rank(True), any_rank(False)] == [True, False, True, False]
    assert_in_sync(nn.Linear(2, 2))
    assert_in_sync(torch.ones(2))
    assert_in_sync([])
    with pytest.raises(RuntimeError, match="rank 0 can't read the values to compare: AttributeError"):
        assert_in_sync([None])  # type: ignore[list-item]
    teardown()


@pytest.mark.parametrize(
    ("backend", "gpus", "local_ranks", "expected"),
    [
        (None, 0, "2", ("gloo", {})),
        (None, 1, "2", ("gloo", {})),
        (None, 2, "2", ("nccl", {"device_id": torch.device("cuda", 1)})),
        (None, 2, "", ("gloo", {})),  # not known: as if all four ranks were on this node
        ("gloo", 2, "2", ("gloo", {})),
        ("nccl", 2, "2", ("nccl", {"device_id": torch.device("cuda", 1)})),
    ],
)
def test_setup_gives_device_id_to_gpus_only(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, gpus: int, local_ranks: str, expected: tuple[str, dict]
) -> None:
    calls: list[Any] = []
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": local_ranks}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((*args, kwargs)))
    setup(backend)
    assert calls == [*expected[1].values(), expected]  # the current device first, then the group


def test_teardown_frees_a_cycle_before_it_destroys_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        pass

    node = Node()
    node.self = node  # type: ignore[attr-defined]
    alive, seen = weakref.ref(node), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append(alive()))
    gc.disable()
    try:
        del node
        assert alive() is not None
        teardown()
    finally:
        gc.enable()
    assert seen == [None]


def test_checksum_is_of_the_bytes() -> None:
    assert checksum([torch.zeros(2)]) == checksum([torch.zeros(1), torch.zeros(1)])
    assert checksum([torch.tensor([0.0])]) != checksum([torch.tensor([-0.0])])
    assert checksum([torch.tensor(float("nan"))]) == checksum([torch.tensor(float("nan"))])
    grid = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert checksum([grid]) == hashlib.sha256(grid.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert checksum([grid.t()]) == checksum([grid.t().contiguous()]) != checksum([grid])
    assert (
        checksum([]) == checksum([torch.empty(0)]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def test_unwrap_goes_through_every_layer() -> None:
    inner = nn.Linear(1, 1)
    compiled = nn.Module()
    compiled._orig_mod = inner
    assert unwrap(inner) is unwrap(compiled) is inner
    outer = nn.ModuleDict({"module": inner})
    assert unwrap(outer) is outer  # a submodule that is called `module` is no wrapper


def model_of(r: int, change: str = "") -> nn.Module:
    """Return a model that rank 0 builds as all do, and the others with `change`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        if change == "parameter" and r == 2:
            model[0].weight[1, 2] += 0.25
            model[0].weight[0, 0] -= 0.5
            model[2].bias[0] += 9
        if change == "buffer" and r == 1:
            model[1].running_mean[0] += 2
    return model


def scenarios(r: int) -> dict[str, Any]:
    """Return what to compare on rank r; each one is the same on all ranks, or differs as its name says."""
    mine = torch.arange(4)
    return {
        "equal": model_of(r),
        "parameter": model_of(r, "parameter"),
        "buffer": model_of(r, "buffer"),
        "kinds": [torch.zeros(()), torch.empty(0, 3), mine, mine > 1, mine.bfloat16(), mine * 1j, mine.float()[::2]],
        "shared nan": torch.tensor([float("nan"), float("inf")]),
        "one nan": {"loss": torch.tensor([float("nan") if r == 1 else 1.0, float("nan"), float("inf")])},
        "minus zero": [torch.tensor([-0.0 if r else 0.0, float("nan")])],
        "integers": [torch.tensor([1, 2**60 + (r == 2)])],
        "booleans": [torch.tensor([True, r != 1])],
        "shape": [torch.ones(2), torch.ones(3 + (r == 1))],
        "dtype": [torch.ones(2, dtype=torch.float64 if r == 2 else torch.float32)],
        "name": {"weight" if r != 2 else "wieght": torch.ones(1)},
        "more": [torch.ones(1)] * (2 if r == 2 else 1),
        "none": [torch.ones(1)] * (r != 1),
        "unreadable": [torch.ones(1) if r != 1 else torch.ones(1, device="meta")],
    }


def in_sync(r: int) -> dict[str, str]:
    """Return the error of each scenario, "" for none."""
    errors = {}
    for name, values in scenarios(r).items():
        try:
            assert_in_sync(values)
            errors[name] = ""
        except (AssertionError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def on_each_rank(r: int) -> dict[str, Any]:
    """Run all checks of this file that need ranks, in one launch."""
    setup()
    setup()
    found: dict[str, Any] = {"who": (rank(), world_size(), dist.get_backend())}
    flags = [(False,) * 3, (True, False, False), (False, False, True), (True,) * 3]
    found["agree"] = [(all_ranks_ok(f[r]), any_rank(f[r])) for f in flags]
    found["errors"] = in_sync(r)
    ddp = DistributedDataParallel(model_of(r))
    assert_in_sync(ddp)
    with torch.no_grad():
        ddp.module[2].bias += r
    try:
        assert_in_sync(ddp)
    except AssertionError as error:
        found["wrapped"] = str(error)
    after = torch.ones(1)
    dist.all_reduce(after)
    found["after"] = after.item()  # no collective of one rank alone is left over
    alive = weakref.ref(ddp)
    del ddp
    teardown()
    found["left"] = (alive() is None, dist.is_initialized(), rank(), world_size())
    teardown()
    setup()
    found["again"] = (rank(), all_ranks_ok(True))
    teardown()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(on_each_rank, nprocs=WORLD, timeout=60)


def test_ranks_join_leave_and_join_again(results: list[dict[str, Any]]) -> None:
    assert [r["who"] for r in results] == [(i, WORLD, "gloo") for i in range(WORLD)]
    assert [r["left"] for r in results] == [(True, False, 0, 1)] * WORLD
    assert [r["again"] for r in results] == [(i, True) for i in range(WORLD)]


def test_ranks_agree(results: list[dict[str, Any]]) -> None:
    assert all(r["agree"] == [(False, False), (False, True), (False, True), (True, True)] for r in results)


def test_all_ranks_raise_the_same_and_no_collective_is_left(results: list[dict[str, Any]]) -> None:
    assert results[0]["errors"] == results[1]["errors"] == results[2]["errors"]
    assert [r["after"] for r in results] == [WORLD] * WORLD


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("equal", None),
        ("kinds", None),
        ("shared nan", None),
        ("parameter", "parameter 0.weight of rank 2 is up to 0.5 away from rank 0's, in 2 of 12 elements"),
        ("buffer", "buffer 1.running_mean of rank 1 is up to 2 away from rank 0's, in 1 of 3 elements"),
        ("one nan", "tensor loss of rank 1 is up to nan away from rank 0's, in 1 of 3 elements"),
        ("minus zero", "tensor 0 of rank 1 equals rank 0's in value but not bit by bit"),
        ("integers", "tensor 0 of rank 2 is up to 1 away from rank 0's, in 1 of 2 elements"),
        ("booleans", "tensor 0 of rank 1 is up to 1 away from rank 0's, in 1 of 2 elements"),
        ("shape", "place 1, rank 0 has tensor 1 of shape [3], torch.float32 and rank 1 has tensor 1 of shape [4]"),
        (
            "dtype",
            "rank 0 has tensor 0 of shape [2], torch.float32 and rank 2 has tensor 0 of shape [2], torch.float64",
        ),
        ("name", "rank 0 has tensor weight of shape [1], torch.float32 and rank 2 has tensor wieght of shape [1]"),
        ("more", "at place 1, rank 0 has nothing and rank 2 has tensor 1 of shape [1], torch.float32"),
        ("none", "at place 0, rank 0 has tensor 0 of shape [1], torch.float32 and rank 1 has nothing"),
        ("unreadable", "RuntimeError: rank 1 can't read the values to compare: NotImplementedError"),
    ],
)
def test_assert_in_sync_names_the_first_difference(
    results: list[dict[str, Any]], scenario: str, says: str | None
) -> None:
    error = results[1]["errors"][scenario]
    assert error == "" if says is None else says in error


def test_assert_in_sync_looks_through_the_wrapper(results: list[dict[str, Any]]) -> None:
    assert "parameter 2.bias of rank 1 is up to 1 away" in results[0]["wrapped"]


SHORTEST = """
import torch
from torch.nn.parallel import DistributedDataParallel
from ddp_helpers.process_group import setup, teardown

setup("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
model(torch.ones(4, 10)).sum().backward()
del model
teardown()
"""


@pytest.mark.slow
def test_the_shortest_script_ends_with_status_0_each_time(tmp_path: Path) -> None:
    # With a bare destroy_process_group() instead, some of the runs abort while the interpreter ends: 4 of 25 here.
    script = tmp_path / "shortest.py"
    script.write_text(SHORTEST)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(int(os.environ.get("DDP_REPEAT", "5"))):
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
