"""Live ranks that the tests of this folder share, and a look at what is left after each test."""

import contextlib
import os
from pathlib import Path

import pytest
from looking import gone

from ddp_helpers import Ranks
from ddp_helpers.launcher import rank, reaper


class _Shared:
    """Ranks that are started once for each size and kept between tests."""

    def __init__(self) -> None:
        self.kept: dict[int, Ranks] = {}

    def __call__(self, nprocs: int) -> Ranks:
        ranks = self.kept.get(nprocs)
        if ranks is None:
            ranks = self.kept[nprocs] = Ranks(nprocs, timeout=60)
        if ranks._pool.ended:
            ranks.restart()
        ranks.execute("for name in [n for n in globals() if n[0] != '_' and n != 'display']: del globals()[name]")
        ranks.execute("import os, sys, time, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])")
        return ranks


@pytest.fixture(scope="session")
def _shared():
    shared = _Shared()
    yield shared
    for ranks in shared.kept.values():
        ranks.close()


@pytest.fixture
def live(_shared):
    """Two live ranks, where `rank`, os, sys, time, torch and dist are defined."""
    ranks = _shared(2)
    yield ranks
    with contextlib.suppress(Exception):
        ranks.execute("if dist.is_initialized(): dist.destroy_process_group()")


@pytest.fixture
def live4(_shared):
    """The same with four ranks."""
    ranks = _shared(4)
    yield ranks
    with contextlib.suppress(Exception):
        ranks.execute("if dist.is_initialized(): dist.destroy_process_group()")


@pytest.fixture
def own_temporary(tmp_path, monkeypatch):
    """A temporary folder that no other program writes to, here and on ranks that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture(autouse=True)
def no_process_left(_shared):
    """After every test only the shared ranks live."""
    yield
    kept = {r.process.pid for ranks in _shared.kept.values() for r in ranks._pool.ranks if r.process is not None}
    left = reaper.marked(f"{rank.MARK}={os.getpid()}-") - kept
    assert gone(left, 1), left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the long repetitions unless somebody says how many."""
    for item in items:
        long = item.get_closest_marker("slow") and item.path.parent == Path(__file__).parent
        if long and "DDP_REPEAT" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes minutes: set DDP_REPEAT, to 20 for example"))
