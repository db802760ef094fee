"""Helpers of these tests: how often to repeat, which processes live, what this process holds."""

import collections
import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

REPEAT = int(os.environ.get("DDP_REPEAT", "5"))
BUSY = 4  # times longer than promised: the machine may be busy
SECONDS = 5.0 * BUSY  # the error reaches the caller within 5 s of the first failure


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids, seconds: float = SECONDS) -> bool:
    """Whether these processes end within `seconds`."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def with_text(text: str) -> list[int]:
    """Return the living processes, but for this one, that have `text` in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and alive(int(entry)):
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
    return found


def children(pid: int | None = None) -> list[int]:
    """Return the living children of a process; this one's own resource tracker is Python's business."""
    found = []
    for path in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return [p for p in found if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def held() -> dict[str, object]:
    """Return what this process holds: files by kind, threads, children, temporary and shared memory files."""
    gc.collect()
    kinds: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{fd}").split(":")[0]] += 1
    return {
        "files": +kinds,
        "threads": {thread.name for thread in threading.enumerate()},
        "children": children(),
        "temporary": set(os.listdir(tempfile.gettempdir())),
        "shared memory": {name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name},
    }


def sleepers(token: str) -> str:
    """Return source that starts processes which don't want to end; each has `token` in its command line."""
    deaf = "import signal,time;[signal.signal(s,signal.SIG_IGN) for s in (2,15,1)];time.sleep(600)"
    start = f"[{sys.executable!r}, '-c', {deaf!r}, {token!r}]"
    return f"""
import os, subprocess, time
started = [subprocess.Popen({start}), subprocess.Popen({start}, start_new_session=True),
    subprocess.Popen({start}, env={{}})]
if os.fork() == 0:
    os.execv({sys.executable!r}, {start})
from torch.utils.data import DataLoader
workers = iter(DataLoader(range(100), num_workers=1, prefetch_factor=1))
next(workers)
while len([p for p in os.listdir("/proc") if p.isdigit() and os.path.exists(f"/proc/{{p}}/cmdline")
           and {token.encode()!r} in open(f"/proc/{{p}}/cmdline", "rb").read()]) < 4: time.sleep(0.05)
"""
