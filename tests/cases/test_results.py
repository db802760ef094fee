"""Success means that every rank delivered a result; what arrives is what the rank returned."""

import contextlib
import ctypes
import dataclasses
import enum
import os
import re
import resource
import signal
import sys
import threading
import time

import pytest
import torch
from looking import SECONDS

from ddp_helpers import RankError, TravelError, launch


def close_everything():
    os.closerange(0, 4096)


def exit_from_a_thread():
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(60)


WAYS_OUT = {
    "sys.exit(3)": (lambda: sys.exit(3), "raised SystemExit in FILE: 3"),
    "os._exit(0)": (lambda: os._exit(0), "ended with exit code 0 before it delivered a result"),
    "os._exit(0) in a thread": (exit_from_a_thread, "ended with exit code 0 before it delivered a result"),
    "another program": (lambda: os.execvp("true", ["true"]), "ended with exit code 0 before it delivered a result"),
    "closed files": (close_everything, r"ended with exit code \d+ before it delivered a result"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    "SIGSEGV": (lambda: ctypes.string_at(0), "was killed by SIGSEGV in FILE"),
    "a real-time signal": (lambda: os.kill(os.getpid(), 40), "was killed by signal 40"),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_a_rank_that_leaves_without_a_result_has_failed(way_out):
    leave, message = WAYS_OUT[way_out]

    def work(rank):
        return leave() if rank == 1 else "a result"

    with pytest.raises(RankError) as caught:
        launch(work)
    assert re.fullmatch("rank 1 " + message.replace("FILE", r"test_results\.py, line \d+"), str(caught.value))


def test_a_result_delivered_before_a_slow_exit_counts():
    """An atexit handler gets one second, even one that holds the GIL."""

    def work(rank):
        import atexit

        atexit.register(ctypes.PyDLL(None).sleep, 600)
        return rank

    begin = time.monotonic()
    assert launch(work, timeout=30) == [0, 1]
    assert time.monotonic() - begin < 25


def test_closed_output_is_no_failure(live):
    assert live.run(lambda: (os.close(1), os.close(2), time.sleep(0.1), 5)[-1]) == [5, 5]
    assert live.run(lambda: 6) == [6, 6]
    live.restart()


def test_a_forked_child_that_returns_is_not_taken_for_the_rank(live):
    live.execute("me = os.getpid()\ndef fork():\n    os.fork()\n    return os.getpid()")
    pids = live.pull("me")
    assert [live.pull("fork()") for _ in range(3)] == [pids] * 3
    live.execute("if os.fork() == 0: raise ValueError('in the child')")
    assert live.pull("os.getpid()") == pids


def test_a_death_is_noticed_while_forked_children_live(live):
    live.execute("def die():\n    if os.fork() == 0: time.sleep(600)\n    os.kill(os.getpid(), 9)")
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        live.execute("if rank == 1: die()")
    assert time.monotonic() - begin < SECONDS


def test_a_death_in_the_middle_of_a_large_result_is_noticed(live):
    live.execute("import threading\nif os.fork() == 0: time.sleep(600)")
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        live.pull("threading.Timer(0.02, os.kill, (os.getpid(), 9)).start() or bytes(300_000_000)")


class Picky(Exception):
    def __init__(self, a, b):
        super().__init__(a)


def test_a_result_that_cannot_be_rebuilt_is_a_clear_error_and_the_ranks_stay(live):
    message = r"^rank 0 sent its result, but it can't be rebuilt here: TypeError: .*missing 1 required"
    with pytest.raises(TravelError, match=message):
        live.run(lambda: Picky(1, 2))
    assert live.run(lambda: 7) == [7, 7]


def test_an_interrupted_follower_never_shifts_the_answers(live):
    """When the notebook's own stdout fails in the middle of a cell, no later call gets this cell's answer."""

    class Failing:
        def write(self, text):
            raise UnicodeEncodeError("ascii", text, 0, 1, "not this character")

        flush = isatty = lambda self: False

    with pytest.raises(UnicodeEncodeError), contextlib.redirect_stdout(Failing()):
        live.execute("print('é', flush=True); time.sleep(0.5)")
    with pytest.raises(RuntimeError, match="the ranks have ended: UnicodeEncodeError"):
        live.run(lambda: 42)


def test_large_and_many_tensors_arrive(live):
    (large, _) = live.pull("torch.arange(25_000_000, dtype=torch.float32) if rank == 0 else None")
    assert large.nbytes == 100_000_000 and large[-1] == 24_999_999
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        many = live.pull("[torch.full((2,), i) for i in range(3000)]")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [t[1].item() for t in many[1]] == list(range(3000))


VALUES = {
    "a leaf": "torch.ones(2, requires_grad=True)",
    "with a graph": "torch.ones(2, requires_grad=True) * 2",
    "a model": "torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))",
    "an exception": "[ValueError('a value'), KeyError('k')]",
    "an optimizer state": "torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()",
    "a sparse tensor": "torch.eye(3).to_sparse()",
    "a set of odd things": "[{1, 2}, slice(3), ..., 1j, range(3), b'\\x00', 'é']",
}


@pytest.mark.parametrize("value", VALUES)
def test_values_of_many_kinds_arrive(live, value):
    here, (there, _) = eval(VALUES[value]), live.pull(VALUES[value])
    assert type(there) is type(here)
    if isinstance(here, torch.Tensor):
        assert torch.equal(there.to_dense(), here.to_dense())
        assert there.requires_grad == (here.requires_grad and here.is_leaf)
    elif value not in ("a model",):
        assert repr(there) == repr(here)
    else:
        assert [p.requires_grad for p in there.parameters()] == [True] * 4


STAY_BEHIND = ["threading.Lock()", "(i for i in ())", "socket.socket()", "[{'deep': sys._getframe()}]"]


@pytest.mark.parametrize("value", STAY_BEHIND)
def test_what_cannot_travel_is_an_error_with_rank_and_type(live, value):
    live.execute("import socket, threading")
    with pytest.raises(RankError, match=r"^rank 0 raised TravelError: the result of type \w+: .*can't be sent"):
        live.pull(value)
    assert live.pull("rank") == [0, 1]


def test_dataclasses_and_enums_keep_their_identity_and_a_redefined_one_is_used(live):
    def define(factor):
        class Colour(enum.Enum):
            RED = factor

        @dataclasses.dataclass
        class Point:
            x: int
            colour: Colour = Colour.RED

            def scaled(self):
                return self.x * factor

        return Colour, Point

    for factor in (2, 5):
        Colour, Point = define(factor)
        found = live.run(lambda Point=Point: (Point(3), Point(3).scaled()))
        for point, scaled in found:
            assert type(point) is Point and point.colour is Colour.RED and scaled == 3 * factor
        assert found[0] == found[1]
