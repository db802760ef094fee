"""Let ranks fail in random ways for some minutes and check each time what is promised: `make attack MINUTES=10`.

After each failure: the error names the cause, nothing is left of the ranks and what they started, and this process
holds what it held. Ends with counts; the status is 1 if a promise was broken. `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence

from ddp_helpers import HangError, RankError, Ranks, launch
from ddp_helpers.launcher import rank as child
from ddp_helpers.launcher import reaper

KILLED = "rank {r} was killed by "
EXITED = "rank {r} ended with exit code {n} before it delivered a result"
KINDS = {  # name -> (what the failing rank runs, the error's text, a pattern)
    "exception": ("raise KeyError('cause')", r"rank {r} raised KeyError in .*: 'cause'"),
    "sys.exit": ("sys.exit(0)", r"rank {r} raised SystemExit in .*: 0"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", r"rank {r} raised KeyboardInterrupt in .*"),
    "os._exit(0)": ("os._exit(0)", EXITED.replace("{n}", "0")),
    "os._exit in a thread": ("threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(99)", EXITED),
    "another program": ("os.execvp('true', ['true'])", EXITED.replace("{n}", "0")),
    "SIGTERM": ("os.kill(os.getpid(), 15)", KILLED + "SIGTERM"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", KILLED + "SIGKILL: the machine may have run out of memory"),
    "SIGSEGV": ("ctypes.string_at(0)", KILLED + "SIGSEGV in .*"),
    "SIGABRT": ("os.abort()", KILLED + "SIGABRT in .*"),
    "forked, then SIGKILL": ("os.fork() or time.sleep(99); os.kill(os.getpid(), 9)", KILLED + "SIGKILL: .*"),
    "closed files": ("os.closerange(0, 4096)", EXITED),
    "unpicklable": ("bad = threading.Lock()", r"rank {r} raised TravelError.*the result of type lock.*"),
    "deadline": ("time.sleep(99)", r"no sign of life for 2 s: .*rank {r} is in .*"),
    "deadline, holds the GIL": ("ctypes.PyDLL(None).sleep(99)", r"no sign of life for 2 s: .*rank {r} is in .*"),
    "stopped": ("os.kill(os.getpid(), 19)", r"no sign of life for 2 s: .*rank {r} does not answer.*"),
    "interrupt": ("print('interrupt', flush=True); time.sleep(99)", ""),
    "none": ("pass", ""),
}
COMPANY = {  # what was started before, and what the other ranks do meanwhile
    "alone": "",
    "in a group": "dist.init_process_group('gloo'); dist.barrier()",
    "with programs": "subprocess.Popen(['sleep', '99']); subprocess.Popen(['sleep', '99'], start_new_session=True)",
    "with workers": "workers = iter(DataLoader(range(99), num_workers=1)); next(workers)",
    "with output": "print('x' * 200_000); os.write(1, b'unfinished')",
}
WORK = """
import ctypes, os, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
bad, workers = None, None
{company}
time.sleep({delay})
if int(os.environ["RANK"]) == {failing}:
    at = time.monotonic()
    {action}
elif dist.is_initialized() and {waits}:
    dist.all_reduce(torch.ones(1))
"""


def run_it(rank: int | None, source: str) -> object:
    names: dict[str, object] = {}
    exec(compile(source, "attack", "exec"), names)
    return names["bad"]


class _Watch:
    """Takes the ranks' output; interrupts this process when a rank asks for it."""

    def write(self, text: str) -> None:
        if "interrupt\n" in text:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def held() -> tuple[int, int, frozenset[str]]:
    """Return the numbers of open files and threads, and the files in shared memory that are ours."""
    gc.collect()
    shared = frozenset(name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared


def attack(minutes: float, seed: int) -> int:
    """Attack for some minutes; print counts; return the number of broken promises."""
    choose, end = random.Random(seed), time.monotonic() + 60 * minutes
    print(f"seed {seed}, {minutes:g} minutes", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    leaks: list[str] = []
    longest = 0.0
    once_only = WORK.format(company=COMPANY["in a group"], failing=0, action="pass", waits=False, delay=0)
    launch(run_it, (once_only,))  # what is imported and opened once
    before = held()
    turns = 0
    while time.monotonic() < end or not turns:
        turns += 1
        kind, nprocs, once = choose.choice(list(KINDS)), choose.randint(1, 4), choose.random() < 0.5
        company, failing, waits = choose.choice(list(COMPANY)), choose.randrange(nprocs), choose.random() < 0.7
        if kind == "interrupt":
            failing = 0  # the rank whose output is shown live
        action, pattern = KINDS[kind]
        source = WORK.format(
            company=COMPANY[company],
            failing=failing,
            action=action,
            waits=waits and kind not in ("none", "unpicklable"),
            delay=round(choose.random() / 5, 2),
        )
        what = f"{turns}: {kind}, rank {failing} of {nprocs}, {'launch' if once else 'live'}, {company}"
        counts[kind] += 1
        error: BaseException | None = None
        ranks: Ranks | None = None
        with contextlib.redirect_stdout(_Watch()):  # type: ignore[type-var]
            begin = time.monotonic()
            try:
                if once:
                    launch(run_it, (source,), nprocs, timeout=2 if "deadline" in kind or kind == "stopped" else 60)
                else:
                    ranks = Ranks(nprocs, timeout=60)
                    ranks.execute("import torch, torch.distributed")
                    ranks.timeout = 2 if "deadline" in kind or kind == "stopped" else 60
                    begin = time.monotonic()
                    ranks.run(run_it, None, source)
            except (RankError, KeyboardInterrupt) as problem:
                error = problem
            finally:
                took = time.monotonic() - begin
                if ranks is not None:
                    ranks.close()
        wrong += [f"{what}: {error!r}"] if not _is_right(error, kind, pattern, failing) else []
        longest = max(longest, 0.0 if once else took)
        mark = f"{child.MARK}={os.getpid()}-"
        if left := reaper.marked(mark):
            leaks.append(f"{what}: processes {sorted(left)}")
            reaper.end_marked(mark)
        del ranks, error
        if (now := held()) != before:
            leaks.append(f"{what}: {before} became {now}")
            before = now
    print(f"launches {turns}")
    print("kinds " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    print("\n".join([f"wrong headlines {len(wrong)}", *wrong, f"leaks {len(leaks)}", *leaks]))
    print(f"longest from a command on live ranks to its error, clean-up included: {longest:.1f} s")
    return len(wrong) + len(leaks)


def _is_right(error: BaseException | None, kind: str, pattern: str, failing: int) -> bool:
    if kind == "none":
        return error is None
    if kind == "interrupt":
        return isinstance(error, KeyboardInterrupt)
    expected = HangError if "no sign" in pattern else RankError
    text = re.escape(str(failing)), r"\d+"
    full = pattern.replace("{r}", text[0]).replace("{n}", text[1])
    return isinstance(error, expected) and re.fullmatch(full, str(error), re.DOTALL) is not None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Let ranks fail in random ways and check what is promised.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    return 1 if attack(options.minutes, seed) else 0


if __name__ == "__main__":
    sys.exit(main())
