"""End every process that carries a mark in its environment, whoever its parent is (standard library only).

The launcher marks the ranks; what they start inherits the mark. `python reaper.py MARK PID FOLDER` is the
guard that outlives a killed kernel: it waits until process PID has gone, then ends what carries the mark and
removes the folder.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable


def marked(mark: str, leaders: Iterable[int] = ()) -> set[int]:
    """Return the ids of the living processes whose environment at their start held `mark` (Linux; else none).

    Some start programs with an environment of their own: the children of those processes count, too, and who is
    in a session that one of them or of `leaders` leads.
    """
    found: set[int] = set()
    kin: dict[int, list[int]] = {}  # process -> its parent, its session
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
                if state not in b"ZX":
                    kin[int(entry)] = [int(parent), int(session)]
            if mark.encode() in _environ(f"/proc/{entry}"):
                found.add(int(entry))
    heads = found.union(pid for pid in leaders if pid not in kin)  # who lives unmarked took a dead one's number
    while more := {pid for pid, near in kin.items() if pid not in found and not heads.isdisjoint(near)}:
        found |= more
        heads |= more
    return found


def _environ(process: str) -> bytes:
    """Return a process's environment, b"" if it can't be read. It is empty for a moment while a program is executed."""
    data = b""
    with contextlib.suppress(OSError):
        for _ in range(20):
            with open(f"{process}/environ", "rb") as file:
                data = file.read()
            if data or not os.path.exists(f"{process}/exe"):  # a zombie or a kernel thread has neither
                break
            time.sleep(0.0005)
    return data


def end_marked(mark: str, leaders: Iterable[int] = (), seconds: float = 2.0) -> None:
    """Kill what `marked` finds, again and again until nothing is left or `seconds` have passed."""
    end = time.monotonic() + seconds
    while (pids := marked(mark, leaders)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _guard(mark: str, parent: int, folder: str) -> None:
    ranks: list[int] = []
    while os.getppid() == parent:
        if select.select([0], [], [], 0.5)[0]:
            if not (data := os.read(0, 4096)):
                break
            ranks = [int(pid) for pid in data.split()]
    end_marked(mark, ranks, 10.0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), sys.argv[3])
