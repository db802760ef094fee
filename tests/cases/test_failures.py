"""The error is the root cause, the same text on every run; what hangs is reported; nothing is waited for in vain."""

import ctypes
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from looking import REPEAT, SECONDS
from torch.utils.data import DataLoader

from ddp_helpers import HangError, RankError, launch

SCENARIOS = {
    "the others lose their connection first": (
        """
dist.init_process_group("gloo")
try:
    if rank == 2:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
    time.sleep(0.2 if rank == 2 else 0)
""",
        "rank 2 raised KeyError in cell 5, line 5: 'the cause'",
    ),
    "the others turn the lost connection into an error of their own": (
        """
dist.init_process_group("gloo")
try:
    if rank == 2:
        time.sleep(0.05)
        dist.destroy_process_group()
        time.sleep(0.2)
        raise KeyError("the cause")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError("training failed") from error
finally:
    if dist.is_initialized(): dist.destroy_process_group()
""",
        "rank 2 raised KeyError in cell 5, line 8: 'the cause'",
    ),
    "a lost connection in a finally hides the cause": (
        """
dist.init_process_group("gloo")
if rank == 2:
    try:
        time.sleep(0.2)
        raise KeyError("the cause")
    finally:
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
dist.destroy_process_group()
""",
        "rank 2 raised KeyError in cell 5, line 6: 'the cause'",
    ),
    "the first of several": (
        "if not dist.is_initialized(): dist.init_process_group('gloo')\ndist.barrier()\n"
        "time.sleep([0.8, 0, 0.4, 0.8][rank])\nraise [OSError, KeyError, ValueError, OSError][rank](rank)",
        "rank 1 raised KeyError in cell 5, line 4: 1",
    ),
    "the lowest of those that fail alike": (
        "time.sleep(0.05 * (3 - rank))\nassert False, 'everywhere'",
        "rank 0 raised AssertionError in cell 5, line 2: everywhere",
    ),
    "an error whose text fails": (
        "class E(Exception):\n    def __str__(self): raise OSError\nif rank == 3: raise E",
        "rank 3 raised E in cell 5, line 3: (its text can't be shown: OSError)",
    ),
    "the innermost line of the cell": (
        "import json\ndef load():\n    return json.loads('{')\nif rank == 1: load()",
        "rank 1 raised JSONDecodeError in cell 5, line 3: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_error_is_the_cause_and_reads_the_same_on_every_run(live4, scenario):
    source, expected = SCENARIOS[scenario]
    texts = set()
    for _ in range(4 * REPEAT if "sleep" not in source else REPEAT):
        with pytest.raises(RankError) as caught:
            live4.execute(source, "cell 5")
        texts.add(str(caught.value))
    assert texts == {expected}
    assert live4.pull("rank") == [0, 1, 2, 3]


def killed_while_others_wait(rank):
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError("training failed") from error
    finally:
        time.sleep(0.1)


@pytest.mark.parametrize("runs", [2, pytest.param(4 * REPEAT, marks=pytest.mark.slow)])
def test_a_killed_rank_is_the_cause_while_the_others_wait(runs):
    for _ in range(runs):
        with pytest.raises(RankError) as caught:
            launch(killed_while_others_wait, nprocs=3)
        assert str(caught.value) == "rank 1 was killed by SIGKILL: the machine may have run out of memory"


def slow(i):
    time.sleep(600)


def stuck_in_different_ways(rank):
    dist.init_process_group("gloo")
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    elif rank == 1:
        next(iter(DataLoader(range(9), num_workers=1, collate_fn=slow)))
    elif rank == 2:
        ctypes.PyDLL(None).sleep(600)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_launch_that_hangs_says_where_each_rank_is():
    begin = time.monotonic()
    with pytest.raises(HangError) as caught:
        launch(stuck_in_different_ways, nprocs=4, timeout=4)
    line = stuck_in_different_ways.__code__.co_firstlineno
    states = [
        f"rank 0 waits in all_reduce, test_failures.py line {line + 3}",
        f"rank 1 waits in get, test_failures.py line {line + 5}",
        f"rank 2 is in test_failures.py line {line + 7}",
        "rank 3 does not answer",
    ]
    text = re.sub(r"(rank 1 waits in )\w+", r"\1get", str(caught.value))  # the name is torch's
    assert text.startswith(f"no sign of life for 4 s: {'; '.join(states)}.\n")
    assert time.monotonic() - begin < 4 + 2 * SECONDS


def test_where_looks_at_ranks_that_wait_and_lets_them_go_on(live4):
    source = """
from torch.utils.data import DataLoader
def slow(i):
    time.sleep(1.5)
    return 7
if rank == 0: time.sleep(1.5)
elif rank == 1: (found,) = DataLoader([0], num_workers=1, collate_fn=slow, batch_size=1)
elif rank == 2: sum(range(60_000_000))
else: __import__("subprocess").run(["sleep", "1.5"], check=True)
"""
    answers = []
    thread = threading.Thread(target=lambda: [time.sleep(0.7), *(answers.append(live4.where()) for _ in range(20))])
    thread.start()
    live4.execute(source, "cell 8")
    thread.join()
    assert "cell 8 line 6" in answers[0] and "cell 8 line 7" in answers[0] and "cell 8 line 9" in answers[0]
    assert not [a for a in answers if "does not answer" in a]
    assert live4.pull("rank") == [0, 1, 2, 3]


def test_a_rank_that_closed_its_files_and_sleeps_is_reported(live):
    live.execute("def close(): os.closerange(0, 4096); time.sleep(600)")
    with pytest.raises(HangError, match="rank 0 finished; rank 1 "):
        live.execute("if rank == 1: close()", timeout=1)


def test_a_rank_that_does_not_read_cannot_stop_the_notebook(live):
    """Its deadline holds for data that it does not take, too."""
    live.execute("import ctypes, threading\nthreading.Timer(0.3, ctypes.PyDLL(None).sleep, (600,)).start()")
    time.sleep(1.5)
    live.timeout = 1
    try:
        with pytest.raises(HangError):
            live.push(x=bytes(5_000_000))
    finally:
        live.timeout = 60


def test_a_crash_of_a_worker_is_not_taken_for_the_place_where_the_rank_ended(live):
    source = """
import ctypes, multiprocessing
worker = multiprocessing.Process(target=ctypes.string_at, args=(0,))
worker.start(); worker.join()
if rank == 1: os.kill(os.getpid(), 15)
"""
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGTERM$"):
        live.execute(source, "cell 3")


def ddp_step(rank):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()
    return model.module.weight.grad.sum().item()


@pytest.mark.parametrize("launches", [1, pytest.param(20 * REPEAT, marks=pytest.mark.slow)])
def test_ranks_that_used_ddp_end_well(launches):
    """The interpreter's shutdown, which aborts after DDP on gloo, is not run."""
    for _ in range(launches):
        assert launch(ddp_step) == [128.0, 128.0]


def test_an_abort_in_the_code_is_told_apart():
    def work(rank):
        ddp_step(rank)
        if rank == 0:
            os.abort()

    with pytest.raises(RankError, match=r"^rank 0 was killed by SIGABRT in test_failures\.py, line \d+$"):
        launch(work)
