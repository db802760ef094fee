"""End every process that carries a mark in its environment, whoever its parent is (standard library only).

The launcher marks the ranks; what they start inherits the mark. `python reaper.py MARK PID` is the guard
that outlives a killed kernel: it waits until process PID has gone, then ends what carries the mark.
"""

import contextlib
import os
import select
import signal
import sys
import time


def marked(mark: str) -> list[int]:
    """Return the ids of the living processes whose environment at their start held `mark` (Linux; else none)."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and int(entry) != os.getpid() and mark.encode() in _environ(f"/proc/{entry}"):
            found.append(int(entry))
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


def end_marked(mark: str, seconds: float = 2.0) -> None:
    """Kill all that carries `mark`, again and again until nothing is left or `seconds` have passed."""
    end = time.monotonic() + seconds
    while (pids := marked(mark)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _guard(mark: str, parent: int) -> None:
    while os.getppid() == parent and not select.select([0], [], [], 0.5)[0]:
        pass
    end_marked(mark, 10.0)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
