"""What ranks print is shown in rank order, in whole lines, the same on every run, whatever printed it."""

import subprocess
import sys
import textwrap
import time

import pytest
from looking import REPEAT, SECONDS

from ddp_helpers import HangError, RankError

MANY_LINES = """
import random
for i in range(5000):
    print(rank, i, "x" * (i % 50))
    if i % 1000 == 0: time.sleep(random.random() / 100)
"""

MANY_SOURCES = r"""
import ctypes, logging, random, subprocess, threading, warnings
time.sleep(random.random() / 20)
for piece in range(300): sys.stdout.write(str(piece % 10) * 1000); sys.stdout.flush()
print()
for done in range(0, 101, 10): print(f"\r{done:3}%|{'█' * (done // 10):10}|", end="", file=sys.stderr, flush=True)
print(file=sys.stderr)
os.write(1, b"\xff not UTF-8\r\n")
ctypes.CDLL(None).printf(b"from C, no line end yet")
ctypes.CDLL(None).fflush(None)
print(" and its end")
subprocess.run("echo a program; echo its errors >&2", shell=True, check=True)
logging.getLogger("train").warning("logged")
warnings.simplefilter("always")
warnings.warn("warned")
thread = threading.Thread(target=print, args=("from a thread",)); thread.start(); thread.join()
print("no end of line", end="")
"""


def test_many_lines_come_in_order_on_every_run(live4, capsys):
    expected = "".join(f"[rank {rank}] {rank} {i} {'x' * (i % 50)}\n" for rank in range(4) for i in range(5000))
    for _ in range(REPEAT):
        live4.execute(MANY_LINES)
        assert capsys.readouterr().out == expected


def test_every_source_is_captured_the_same_on_every_run(live4, capsys):
    texts = set()
    for _ in range(4 * REPEAT):
        live4.execute(MANY_SOURCES, "cell 1")
        texts.add(capsys.readouterr().out)
    (text,) = texts
    lines = "".join(str(piece % 10) * 1000 for piece in range(300))
    start = [lines, f"100%|{'█' * 10}|", "\ufffd not UTF-8", "from C, no line end yet and its end"]
    start += ["a program", "its errors", "logged"]
    for rank in range(4):
        mine = [line[9:] for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine[:7] == start
        assert "cell 1:15: UserWarning: warned" in mine and mine[-2:] == ["from a thread", "no end of line"]
    assert all(line.startswith("[rank ") for line in text.splitlines())


def test_what_a_thread_prints_late_comes_with_the_next_cell(live, capsys):
    live.execute("import threading\nthreading.Timer(0.3, print, ('late ' * 50_000,)).start()")
    assert capsys.readouterr().out == ""
    time.sleep(1)
    live.execute("time.sleep(0.3); print('next')")
    assert capsys.readouterr().out == "".join(f"[rank {r}] {'late ' * 50_000}\n[rank {r}] next\n" for r in range(2))


@pytest.mark.parametrize(
    ("end", "error"),
    [("time.sleep(600)", HangError), ("raise ValueError", RankError), ("os.kill(os.getpid(), 9)", RankError)],
)
def test_output_that_waits_behind_rank_0_is_shown_in_the_end(live4, capsys, end, error):
    """Also an unfinished line, and of ranks that had finished before."""
    source = f"print('whole'); os.write(2, b'part')\nif rank == 0:\n    time.sleep(0.5)\n    {end}"
    with pytest.raises(error):
        live4.execute(source, timeout=1.5)
    assert capsys.readouterr().out == "".join(f"[rank {r}] whole\n[rank {r}] part\n" for r in range(4))


FLOODS = {"lines": r"b'x' * 49 + b'\n'", "short lines": r"b'1\n'", "one line": "b'x'", "returns": r"b'x' * 99 + b'\r'"}


@pytest.mark.parametrize("kind", ["lines", *(pytest.param(k, marks=pytest.mark.slow) for k in list(FLOODS)[1:])])
def test_a_flood_neither_hangs_nor_fills_memory(kind):
    """One hundred MB from a rank that is not shown live; the parent's peak grows by less than 150 MB."""
    source = f"part = {FLOODS[kind]}\nif os.environ['RANK'] == '1':\n    for _ in range(100 if len(part) > 2 else 20): "
    flood = source + "os.write(1, part * (1_000_000 // len(part)))"
    script = f"""
        import resource, sys
        from ddp_helpers import Ranks
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        if __name__ == "__main__":
            with Ranks(2, timeout=60) as ranks:
                ranks.execute("import os, sys, time")
                before = peak()
                ranks.execute({flood!r})
                print(peak() - before, file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stderr.split()[-1]) < 150
    assert done.stdout.startswith("[rank 1] ") and len(done.stdout) < 11_000_000
