"""The launcher's promises: results, root causes, deadlines, interrupts, and nothing left behind."""

import contextlib
import enum
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_helpers import HangError, RankError, Ranks, TravelError, launch
from ddp_helpers.launcher import rank as child
from ddp_helpers.launcher import reaper, report


@pytest.fixture(scope="module")
def shared():
    with Ranks(2, timeout=60) as ranks:
        yield ranks


@pytest.fixture
def live(shared):
    """Two live ranks without variables of an earlier test."""
    if shared._pool.ended:
        shared.restart()
    shared.execute(
        "for name in [n for n in globals() if not n.startswith('_') and n != 'display']: del globals()[name]"
    )
    return shared


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Every test ends with the processes it began with."""
    before = set(all_marked())
    yield
    if "live" not in request.fixturenames:
        assert set(all_marked()) <= before


def all_marked() -> list[int]:
    return reaper.marked(f"{child.MARK}={os.getpid()}-")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


class Colour(enum.Enum):
    RED = 1


def test_results_come_back_in_rank_order_as_copies_that_outlive_the_ranks():
    secret = 3
    model = torch.nn.Linear(2, 1)

    def work(rank, factor, model):
        time.sleep(0.2 * (1 - rank))
        with torch.no_grad():
            model.weight.fill_(rank)
        x = torch.ones(2, requires_grad=True)
        return {"t": torch.full((3,), rank * factor * secret), "grad": (x * 2), "model": model, "colour": Colour.RED}

    first, second = launch(work, (10, model))
    assert first["t"].tolist() == [0, 0, 0] and second["t"].tolist() == [30, 30, 30]
    assert not first["grad"].requires_grad  # the graph stayed on the rank
    assert isinstance(second["model"].weight, torch.nn.Parameter) and second["model"].weight[0, 0] == 1
    assert second["colour"] is Colour.RED
    assert model.weight[0, 0] not in (0.0, 1.0)  # the ranks had copies


def test_a_view_travels_without_the_storage_behind_it(live):
    live.execute("import torch\nbig = torch.zeros(10_000_000)\npart = big[:3]")
    (part, _) = live.pull("part")
    assert part.untyped_storage().nbytes() == 12


@pytest.mark.parametrize("nprocs", [0, -1, 65, 2.5, True, "2"])
def test_nprocs_is_checked(nprocs):
    for start in (lambda: launch(print, nprocs=nprocs), lambda: Ranks(nprocs)):
        with pytest.raises(ValueError, match="whole number from 1 to 64"):
            start()


def test_what_cannot_be_sent_is_named_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("a rank was started"))
    lock = threading.Lock()

    def uses_lock(rank):
        return lock

    with pytest.raises(TravelError, match=r"variable 'lock' \(of type lock\)"):
        launch(uses_lock)
    with pytest.raises(TravelError, match=r"argument 1 \(of type generator\)"):
        launch(print, (1, (i for i in range(3))))
    with pytest.raises(TravelError, match=r"variable 'lock'"):
        launch(lambda rank: uses_lock(rank))


def test_large_captured_data_warns_with_its_name(live):
    table = torch.zeros(3_000_000)
    with pytest.warns(UserWarning, match=r"12 MB travel to each rank; the largest part is variable 'table'"):
        assert live.run(lambda: len(table)) == [3_000_000] * 2


def test_module_like_objects_travel_by_name(live):
    def uses_cudnn():
        return torch.backends.cudnn.benchmark, torch.backends.mkldnn.is_available() in (True, False)

    uses_cudnn.__module__ = "__main__"  # by value, with its globals
    assert live.run(uses_cudnn)[0] == (False, True)


def test_a_result_that_cannot_travel_is_an_error_that_says_so(live):
    with pytest.raises(RankError, match=r"rank 0 raised TravelError.*the result of type generator"):
        live.run(lambda: (i for i in range(3)))
    live.execute("import torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    live.execute("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))")
    with pytest.raises(RankError, match=r"use model\.module"):
        live.pull("model")
    assert live.pull("model.module.weight")[0].shape == (1, 1)
    live.execute("dist.destroy_process_group()")


def test_cells_share_a_namespace_and_show_the_last_expression(live, capsys):
    live.execute("import os\nx = int(os.environ['RANK']) + 1")
    live.execute("print('x is', x)\nx * 10")
    live.execute("x;")
    assert capsys.readouterr().out == "[rank 0] x is 1\n[rank 0] 10\n[rank 1] x is 2\n[rank 1] 20\n"
    live.push(y=5)
    assert live.pull("x + y") == [6, 7]
    assert live.pull("x", "y") == ([1, 2], [5, 5])


def test_classes_of_a_cell_pickle_and_their_source_is_found(live):
    live.execute("class Point:\n    x = 1", "cell 1")
    live.execute("import inspect, pickle\nclass Other: pass", "cell 2")
    assert "x = 1" in live.pull("inspect.getsource(Point)")[0]
    assert live.pull("pickle.loads(pickle.dumps(Point())).x") == [1, 1]


def test_dataloader_workers_know_the_classes_of_a_cell(live):
    live.execute("""
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i * i
found = [int(v) for batch in DataLoader(Squares(), batch_size=2, num_workers=1) for v in batch]
""")
    assert live.pull("found") == [[0, 1, 4, 9]] * 2


def test_a_group_can_be_initialised_again_and_again(live):
    cell = """
import torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
"""
    for _ in range(3):
        live.execute(cell)
    assert [t.item() for t in live.pull("total")] == [2.0, 2.0]


def test_a_workers_own_endpoint_is_left_alone():
    with contextlib.closing(__import__("socket").socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def classic(rank, world_size):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item(), os.environ["MASTER_PORT"]

    assert launch(classic, (2,)) == [(2.0, str(port))] * 2


def test_the_environment_is_torchruns_and_the_parents_stays(monkeypatch):
    for name, stale in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "bogus", "GLOO_SOCKET_IFNAME": "nope0"}.items():
        monkeypatch.setenv(name, stale)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, state = dict(os.environ), torch.random.get_rng_state()

    def work(rank):
        dist.init_process_group("gloo")
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        return [int(os.environ[name]) for name in names] + [dist.get_rank(), torch.get_num_threads()]

    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(work) == [[0, 0, 2, 2, 0, threads], [1, 1, 2, 2, 1, threads]]
    assert dict(os.environ) == before and torch.equal(torch.random.get_rng_state(), state)
    assert not dist.is_initialized()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(lambda rank: torch.get_num_threads(), nprocs=1) == [1]


def test_nothing_listens_beyond_the_loopback_interface(live):
    live.execute("import torch.distributed as dist\ndist.init_process_group('gloo')\nimport os\npid = os.getpid()")
    pids = [os.getpid(), *live.pull("pid")]
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                link = os.readlink(fd)
                if link.startswith("socket:"):
                    inodes.add(link[8:-1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
    assert listening and set(listening) <= {"0100007F"}, listening
    live.execute("dist.destroy_process_group()")


def test_output_comes_in_rank_order_in_whole_lines(live, capfd):
    cell = r"""
import ctypes, logging, os, subprocess, sys, time, warnings
rank = int(os.environ["RANK"])
time.sleep(0.1 * (1 - rank))
print("in ", end=""); time.sleep(0.05); print("pieces")
print("10%\r50%\rdone")
os.write(1, b"bad byte \xff\n")
ctypes.CDLL(None).puts(b"from C")
subprocess.run(["echo", "from a subprocess"])
warnings.warn("careful")
logging.warning("logged")
print("no newline at the end", end="")
"""
    texts = set()
    for _ in range(5):
        live.execute(cell, "cell 1")
        texts.add(capfd.readouterr().out)
    (text,) = texts
    one, two = text.split("[rank 1]", 1)
    assert [line.removeprefix("[rank 0] ") for line in one.splitlines()] == [
        line.removeprefix("[rank 1] ") for line in f"[rank 1]{two}".splitlines()
    ]
    for expected in ("in pieces", "done", "bad byte �", "from C", "from a subprocess", "no newline at the end"):
        assert f"[rank 0] {expected}\n" in text
    assert "UserWarning: careful" in text and "logged" in text and "50%" not in text


def test_rank_0_is_shown_while_it_runs(live):
    shown = []

    class Screen:
        def write(self, text):
            shown.append((time.monotonic(), text))

        def flush(self):
            pass

        def isatty(self):
            return False

    with contextlib.redirect_stdout(Screen()):
        live.execute("import time\nprint('early')\ntime.sleep(0.6)")
        end = time.monotonic()
    assert shown[0][1] == "[rank 0] early\n" and end - shown[0][0] > 0.3
    assert "[rank 1]" in shown[1][1]


def test_too_much_output_loses_whole_lines_in_the_middle():
    lines = report.Lines("[rank 0] ")
    for i in range(2_000):
        lines.feed(b"%06d" % i + b"x" * 9_994 + b"\n")
    lines.finish()
    text = lines.take(False) + lines.take(True)
    numbers = [int(line[9:15]) for line in text.splitlines() if "dropped" not in line]
    (note,) = [line for line in text.splitlines() if "dropped" in line]
    assert numbers[0] == 0 and numbers[-1] == 1_999 and f"{2_000 - len(numbers)} lines dropped" in note
    assert 9_900_000 < len(text) < 10_200_000


@pytest.mark.parametrize(
    ("way_out", "message"),
    [
        ("raise ValueError('bad')", r"^rank 1 raised ValueError in cell 4, line 3: bad$"),
        ("import sys; sys.exit(0)", r"^rank 1 raised SystemExit in cell 4, line 3: 0$"),
        ("raise KeyboardInterrupt", r"^rank 1 raised KeyboardInterrupt in cell 4, line 3$"),
    ],
)
def test_live_ranks_survive_an_exception(live, way_out, message):
    live.execute("import os\nkept = 7")
    with pytest.raises(RankError, match=message):
        live.execute(f"\nif os.environ['RANK'] == '1':\n    {way_out}", "cell 4")
    assert live.pull("kept") == [7, 7]


@pytest.mark.parametrize(
    ("way_out", "message"),
    [
        ("os._exit(0)", r"^rank 1 ended with exit code 0 before it delivered a result$"),
        ("os._exit(3)", r"^rank 1 ended with exit code 3 before it delivered a result$"),
        ("os.kill(os.getpid(), 9)", r"^rank 1 was killed by SIGKILL: the machine may have run out of memory$"),
        ("os.abort()", r"^rank 1 was killed by SIGABRT in cell 4, line 3$"),
    ],
)
def test_a_dead_rank_is_a_failure_and_its_output_is_shown(live, capsys, way_out, message):
    with pytest.raises(RankError, match=message):
        live.execute(f"import os; print('before')\nif os.environ['RANK'] == '1':\n    {way_out}", "cell 4")
    assert "[rank 1] before\n" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"the ranks have ended: rank 1 .*ranks\.restart\(\)"):
        live.execute("1")
    live.restart()
    assert live.run(os.getppid) == [os.getpid()] * 2


def test_the_error_is_the_cause_not_the_lost_connection():
    def work(rank):
        dist.init_process_group("gloo")
        if rank == 1:
            try:
                raise KeyError("the cause")
            finally:
                dist.destroy_process_group()
                time.sleep(1)  # slow clean-up: rank 0 reports its lost connection first
        dist.all_reduce(torch.ones(1))

    texts = set()
    for _ in range(3):
        with pytest.raises(RankError) as caught:
            launch(work)
        texts.add(str(caught.value))
    assert texts == {
        f"rank 1 raised KeyError in test_launcher.py, line {work.__code__.co_firstlineno + 4}: 'the cause'"
    }
    assert "rank 0 lost its connection after that (a consequence)" in str(caught.value.__cause__)


def test_of_equal_failures_the_lowest_rank_is_named(live):
    for _ in range(5):
        with pytest.raises(RankError, match=r"^rank 0 raised NameError in cell 2, line 1: name 'nope' is not defined$"):
            live.execute("nope", "cell 2")


def test_ranks_that_do_not_come_back_are_ended(live):
    live.execute("import os, time\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError"):
        live.execute("if os.environ['RANK'] == '1': raise ValueError\ndist.all_reduce(torch.ones(1))")
    assert time.monotonic() - begin < 30
    with pytest.raises(RuntimeError, match="rank 0 was still running 3 s later"):
        live.execute("1")


@pytest.mark.parametrize(
    ("stuck", "state"),
    [
        ("dist.all_reduce(torch.ones(1))", "rank 0 waits in all_reduce, cell 9 line 3; rank 1 finished"),
        ("time.sleep(60)", "rank 0 is in cell 9 line 3; rank 1 finished"),
        ("ctypes.PyDLL(None).sleep(60)", "rank 0 is in cell 9 line 3; rank 1 finished"),  # holds the GIL
        ("while True: pass", "rank 0 is in cell 9 line 3; rank 1 finished"),
    ],
)
def test_the_hang_report_says_where_each_rank_is(live, capsys, stuck, state):
    live.execute("import ctypes, os, time\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    with pytest.raises(HangError) as caught:
        live.execute(f"print('shown')\nif os.environ['RANK'] == '0':\n    {stuck}", "cell 9", timeout=0.5)
    assert str(caught.value).startswith(f"no sign of life for 0.5 s: {state}.\n")
    assert 'File "cell 9", line 3' in str(caught.value.__cause__)
    assert "[rank 0] shown\n[rank 1] shown\n" in capsys.readouterr().out


def test_where_asks_from_another_thread_and_disturbs_nothing(live, capsys):
    assert live.where() == "rank 0 finished\nrank 1 finished"
    live.execute("import os, time")
    answers = []
    thread = threading.Timer(1.0, lambda: answers.append(live.where()))
    thread.start()
    source = "if os.environ['RANK'] == '1':\n    print('done early')\nelse:\n    time.sleep(3)\nresult = 5"
    live.execute(source, "cell 9")
    thread.join()
    assert answers == [
        'rank 0 is in cell 9 line 4\n  File "cell 9", line 4, in <module>\nrank 1 finished\n[rank 1] done early'
    ]
    assert live.pull("result") == [5, 5] and capsys.readouterr().out == "[rank 1] done early\n"
    live.close()
    assert live.where() == "rank 0 has ended\nrank 1 has ended"


def test_output_and_progress_are_signs_of_life(live):
    live.execute("import time\nfor _ in range(6):\n    time.sleep(0.3); print('.')", timeout=0.9)
    live.execute("from ddp_helpers import progress\nfor _ in progress(range(6)): time.sleep(0.3)", timeout=0.9)


def interrupt_soon(seconds: float = 0.7) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupt_keeps_ranks_that_come_back(live):
    live.execute("import time\nkept = 1")
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt, match="the ranks kept their variables"):
        live.execute("time.sleep(60)")
    assert live.pull("kept") == [1, 1]


def test_an_interrupt_ends_ranks_that_do_not_come_back(live):
    live.execute("import time, torch, os, torch.distributed as dist\ndist.init_process_group('gloo')")
    pids = live.run(os.getpid)
    interrupt_soon()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="did not come back"):
        live.execute("if os.environ['RANK'] == '0': dist.all_reduce(torch.ones(1))\nelse: time.sleep(60)")
    assert gone(pids, 1) and time.monotonic() - begin < 20
    live.restart()


def test_descendants_end_with_their_rank(tmp_path):
    note = tmp_path / "pids"

    def work(rank):
        code = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(99)"
        process = subprocess.Popen([sys.executable, "-c", code])
        with note.open("a") as file:
            file.write(f"{process.pid}\n")
        if rank == 1:
            raise ValueError

    with pytest.raises(RankError, match="rank 1 raised ValueError"):
        launch(work)
    pids = [int(line) for line in note.read_text().split()]
    assert pids and gone(pids, 1)


def test_a_process_that_is_just_executing_a_program_is_not_overlooked(tmp_path):
    script = tmp_path / "again.sh"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    for i in range(60):  # one look misses it in 4 of 100
        process = subprocess.Popen([script], env={**os.environ, "MARK_OF_THIS_TEST": f"{os.getpid()}-{i}-"})
        time.sleep(0.01)
        reaper.end_marked(f"MARK_OF_THIS_TEST={os.getpid()}-{i}-")
        try:
            assert process.wait(1) == -signal.SIGKILL
        finally:
            process.kill()


def test_launch_runs_atexit_handlers_and_shows_what_they_print(capsys):
    def work(rank):
        import atexit

        atexit.register(print, "bye")
        return rank

    assert launch(work) == [0, 1]
    assert capsys.readouterr().out == "[rank 0] bye\n[rank 1] bye\n"


def test_bad_cells_never_reach_the_ranks(live):
    with pytest.raises(SyntaxError):
        live.execute("x = = 1")
    for cell in ("!ls", "%time 1", "await thing()"):
        with pytest.raises(SyntaxError, match="plain Python only"):
            live.execute(cell)
    with pytest.raises(RankError, match=r"a rank can't ask questions"):
        live.execute("input('?')")
    with pytest.raises(RankError, match=r"^rank 1 has no variable 'only_0': assign it"):
        live.execute("import os\nif os.environ['RANK'] == '0': only_0 = 1")
        live.pull("only_0")
    assert live.pull("1 + 1") == [2, 2]


def test_nested_and_second_use_are_refused(live):
    with pytest.raises(RankError, match="a rank can't start ranks"):
        live.run(lambda: launch(print))
    thread = threading.Thread(target=live.execute, args=("import time; time.sleep(0.8)",))
    thread.start()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="busy with another cell"):
        live.execute("1")
    thread.join()


def test_launches_leave_no_file_descriptor_thread_or_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fail(rank):
        raise ValueError(rank)

    def held():
        return len(os.listdir("/proc/self/fd")), os.listdir(tmp_path), len(os.listdir("/dev/shm"))

    launch(abs)
    before, threads = held(), set(threading.enumerate())
    for _ in range(3):
        launch(abs)
        with pytest.raises(RankError):
            launch(fail)
    assert held() == before
    assert set(threading.enumerate()) <= threads  # none is new; one of an earlier test may have ended


def script(text: str, *args: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_a_good_script_writes_nothing_but_its_output(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        textwrap.dedent("""
        from ddp_helpers import launch
        def main(rank):
            import torch.distributed as dist
            dist.init_process_group("gloo")
            print("hello")
            dist.destroy_process_group()
        if __name__ == "__main__":
            launch(main)
    """)
    )
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[rank 0] hello\n[rank 1] hello\n")
    file.write_text(file.read_text().replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 1 and "if __name__ == '__main__'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("stuck", ["time.sleep(99)", "ctypes.PyDLL(None).sleep(99)"])
def test_a_killed_parent_leaves_no_rank(stuck, tmp_path):
    process = script(f"""
        import ctypes, os, time
        from ddp_helpers import Ranks
        ranks = Ranks(2)
        print(*ranks.run(os.getpid), flush=True)
        def work():
            os.system("sleep 98 &")
            {stuck}
        ranks.run(work)
    """)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert len(pids) == 2 and gone(pids, 5)


def test_an_interrupted_process_group_ends_at_once():
    process = script(
        """
        import os, sys, time
        from ddp_helpers import launch
        def work(rank):
            print(os.getpid(), flush=True)
            while True:
                try: time.sleep(99)
                except KeyboardInterrupt: pass
        launch(work)
        """,
        start_new_session=True,
    )
    pids = [int(process.stdout.readline().split()[-1])]
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert gone(pids, 1)
    assert out.rstrip().endswith("KeyboardInterrupt") and out.count("Traceback") == 1


def test_a_forgotten_ranks_object_ends_its_ranks():
    ranks = Ranks(1)
    (pid,) = ranks.run(os.getpid)
    del ranks
    assert gone([pid], 3)
