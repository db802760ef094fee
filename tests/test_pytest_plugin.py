"""Tests run on ranks: they pass, fail, skip and hang as a reader expects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_helpers.pytest_plugin import on_ranks

ROOT = Path(__file__).parent.parent
CASES = """
import os
import time

import pytest
import torch
import torch.distributed as dist

from ddp_helpers.pytest_plugin import on_ranks

OFFSET = 3


def helper(x):
    return x + OFFSET


@pytest.fixture
def ones():
    return torch.ones(2)


@on_ranks(2)
def test_passes(rank, world_size, ones):
    total = ones * rank
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0] and world_size == 2


@pytest.mark.parametrize("n", [1, 2])
@on_ranks(2)
def test_fails(n, rank):
    print(f"here is {n}")
    assert helper(n) == rank + 4


@on_ranks(2, timeout=2)
def test_hangs(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(60)


@on_ranks(2)
def test_leaves_early(rank):
    if rank == 0:
        dist.barrier()


@on_ranks(1)
def test_skips():
    pytest.skip("no need")


@on_ranks(1)
def test_is_expected_to_fail():
    pytest.xfail("later")


class TestClass:
    @on_ranks(1)
    def test_method(self, rank):
        assert rank == 0


@on_ranks(1)
def test_cannot_travel(capsys):
    pass


@on_ranks(1, backend=None)
def test_without_a_group(world_size):
    assert not dist.is_initialized() and world_size == 1


@on_ranks(1)
def test_killed():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("cases")
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    command += ["--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def line_of(code: str) -> int:
    return next(i for i, line in enumerate(CASES.splitlines(), 1) if code in line)


def outcome(report: str, name: str) -> str:
    return next(line for line in report.splitlines() if re.match(rf"[A-Z]+ \S*{re.escape(name)}( |$)", line))


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("test_passes", "PASSED", ""),
        (
            "test_fails[1]",
            "FAILED",
            "rank 1 raised AssertionError in test_cases.py, line {assert helper}: assert 4 == (1 + 4)",
        ),
        (
            "test_fails[2]",
            "FAILED",
            "rank 0 raised AssertionError in test_cases.py, line {assert helper}: assert 5 == (0 + 4)",
        ),
        (
            "test_hangs",
            "FAILED",
            "life for 2 s: rank 0 waits in all_reduce, test_cases.py line {dist.all_reduce(torch.ones}; rank 1 is",
        ),
        (
            "test_leaves_early",
            "FAILED",
            "rank 0 raised RuntimeError in test_cases.py, line {dist.barrier}: lost its connection",
        ),
        ("test_is_expected_to_fail", "XFAIL", "later"),
        ("TestClass::test_method", "PASSED", ""),
        ("test_cannot_travel", "FAILED", "the fixture or parameter 'capsys' can't be sent to a rank"),
        ("test_without_a_group", "PASSED", ""),
        ("test_killed", "FAILED", "rank 0 was killed by SIGKILL"),
    ],
)
def test_each_test_ends_as_it_should(report: str, name: str, kind: str, text: str) -> None:
    assert outcome(report, name).startswith(kind)
    assert re.sub(r"{(.*)}", lambda match: str(line_of(match[1])), text) in report


def test_skip_works_on_a_rank(report: str) -> None:
    line = line_of('pytest.skip("')
    assert re.search(rf"SKIPPED \[1\] .*: rank 0 raised Skipped in test_cases.py, line {line}: no need", report)


def test_the_failing_test_shows_its_output_and_the_ranks_traceback(report: str) -> None:
    assert "[rank 0] here is 2\n[rank 1] here is 2\n" in report
    assert "    assert helper(n) == rank + 4\n" in report
    assert "rank 1 had finished: did it make fewer collective calls?" in report


def test_what_is_no_test_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write @on_ranks\(2\)"):
        on_ranks(lambda: None)

    async def test_later() -> None: ...

    with pytest.raises(TypeError, match="test_later must be a plain function"):
        on_ranks(2)(test_later)


@on_ranks(3)
def test_it_works_here(rank: int, world_size: int, tmp_path: Path) -> None:
    ranks = torch.tensor([rank])
    dist.all_reduce(ranks)
    assert ranks.item() == sum(range(world_size)) == 3 and tmp_path.is_dir()
