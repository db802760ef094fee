"""Nothing is left, whatever way the ranks end: no process, file, socket, file descriptor or thread."""

import contextlib
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest
from looking import REPEAT, SECONDS, held, sleepers, with_text

from ddp_helpers import HangError, RankError, Ranks, launch
from ddp_helpers.launcher import rank, reaper


def ends_by_return(source):
    launch(exec_on_rank, (source,))


def ends_by_error(source):
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError"):
        launch(exec_on_rank, (source + "\nif rank == 1: 1 / 0\ntime.sleep(600)",))


def ends_by_death(source):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        launch(exec_on_rank, (source + "\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)",))


def ends_by_deadline(source):
    with pytest.raises(HangError):
        launch(exec_on_rank, (source + "\ntime.sleep(600)",), timeout=3)


def ends_by_interrupt(source):
    """The signal comes to this process alone, twice, as from an impatient reader."""
    deaf = "\nimport signal; signal.signal(2, signal.SIG_IGN); print('now', flush=True); time.sleep(600)"
    timers = [threading.Timer(s, os.kill, (os.getpid(), signal.SIGINT)) for s in (0.0, 2.0)]

    class Out:
        def write(self, text):
            if "now" in text and not timers[0].is_alive() and timers[0].ident is None:
                timers[0].start()
                timers[1].start()

        def flush(self):
            pass

        def isatty(self):
            return False

    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(Out()):
        launch(exec_on_rank, (source + deaf,))
        time.sleep(SECONDS)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(2.5)
    for timer in timers:
        timer.join()


def ends_by_close(source):
    with Ranks(2) as ranks:
        ranks.run(exec_on_rank, 0, source)


def ends_by_being_forgotten(source):
    ranks = Ranks(2)
    ranks.run(exec_on_rank, 0, source)
    del ranks


def ends_after_the_thread_that_started_it(source):
    """The thread's end does not end its ranks; closing them does."""
    kept, end = [], threading.Event()
    thread = threading.Thread(target=lambda: (kept.append(Ranks(2)), kept[0].run(os.getpid), end.wait()))
    thread.start()
    while not kept or not kept[0]._pool.ranks[1].started or kept[0]._pool._lock.locked():
        time.sleep(0.05)
    (ranks,) = kept
    pids = ranks.run(os.getpid)
    threading.Timer(0.3, end.set).start()
    ranks.run(time.sleep, 1.5)
    thread.join()
    ranks.run(exec_on_rank, 0, source)
    assert ranks.run(os.getpid) == pids
    ranks.close()


def exec_on_rank(rank, source):
    exec(source, {"rank": rank})


WAYS = {name: way for name, way in list(globals().items()) if name.startswith("ends_")}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(way, own_temporary):
    """Programs that ignore signals, lead their own session or have their own environment end with their rank."""
    token = f"left-{uuid.uuid4().hex}"
    multiprocessing.resource_tracker.ensure_running()  # Python's own, shared by all
    before = held()
    begin = time.monotonic()
    WAYS[way](sleepers(token))
    assert time.monotonic() - begin < 6 * SECONDS
    end = time.monotonic() + 1
    while with_text(token) and time.monotonic() < end:
        time.sleep(0.02)
    assert with_text(token) == []
    assert held() == before


def fail_in_some_way(rank, turn):
    if rank == turn % 2:
        [lambda: 1 / 0, lambda: os._exit(0), lambda: os.kill(os.getpid(), 9), lambda: os.abort()][turn % 4]()
    return rank


@pytest.mark.parametrize("launches", [3, pytest.param(10 * REPEAT, marks=pytest.mark.slow)])
def test_again_and_again(launches, own_temporary):
    """A third of the launches fail; the next one works, and this process holds what it held."""
    launch(abs)
    before = held()
    for turn in range(launches):
        if turn % 3 == 1:
            with pytest.raises(RankError, match=f"rank {turn % 2} "):
                launch(fail_in_some_way, (turn,))
        else:
            assert launch(abs) == [0, 1]
    assert held() == before


def test_launches_from_threads_at_the_same_time(capsys):
    found, errors = {}, {}

    def start(name):
        try:
            found[name] = launch(fail_in_some_way if name == "bad" else pow, (0,) if name == "bad" else (name,))
        except RankError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=start, args=(name,)) for name in (1, 2, "bad")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [0, 1], 2: [0, 1]}
    assert "rank 0 raised ZeroDivisionError" in errors["bad"]


def test_a_program_that_the_notebook_starts_meanwhile_is_not_ours(live):
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        with pytest.raises(RankError):
            live.execute("os._exit(1)")
        time.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_program_that_got_the_number_of_an_ended_rank_is_not_ours():
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert reaper.marked("a mark that nothing carries", [stranger.pid]) == set()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_forked_child_of_the_notebook_does_not_end_the_ranks():
    with Ranks(1) as ranks:
        child = os.fork()
        if child == 0:
            try:
                ranks.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert ranks.run(abs, -1) == [1]


def test_a_launch_in_another_thread_is_not_taken_for_being_a_rank(monkeypatch):
    """It sets the mark of ranks in this process's environment for a moment."""
    monkeypatch.setenv(rank.MARK, "of another launch")
    assert launch(abs, nprocs=1) == [0]


def test_an_idle_rank_that_cannot_print_does_not_delay_the_end():
    ranks = Ranks(1)
    ranks.execute("import threading\nthreading.Thread(target=lambda: print('x' * 10_000_000), daemon=True).start()")
    ranks._pool.ranks[0].out.close = lambda: None
    begin = time.monotonic()
    ranks.close()
    assert time.monotonic() - begin < SECONDS


def test_too_few_file_descriptors_is_an_error_that_leaves_no_process():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = held()["children"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            launch(abs, nprocs=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert held()["children"] == before
    assert launch(abs, nprocs=1) == [0]


@pytest.mark.slow
def test_pytest_workers_launch_side_by_side(tmp_path):
    text = "import os\nfrom ddp_helpers import launch\ndef test_it():\n    assert launch(abs) == [0, 1]\n"
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
