"""Start ranks with torch.multiprocessing.spawn, run commands on them, and end them without a trace."""

import contextlib
import multiprocessing.resource_tracker
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from . import rank as child
from . import reaper, report, travel

START_SECONDS = 120.0  # without a rank that starts, while they start
BACK_SECONDS = 3.0  # from a first failure until every rank must be back at its prompt
CAUSE_SECONDS = 0.5  # the same in a launch, once a failure that is no consequence is known
INTERRUPT_SECONDS = 2.0  # the same after an interrupt
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGILL, getattr(signal, "SIGBUS", 0))  # have a stack
PIPE = 50_000  # bytes that a control connection takes in while its rank does not read
DUMP_ENDS = (b"in <module>\n", b"  ...\n")  # of faulthandler's text: the main thread's outermost frame comes last
_spawning = threading.Lock()  # the environment is changed for a moment while ranks start


def launch(fn: Callable[..., Any], args: tuple = (), nprocs: int = 2, *, timeout: float | None = 120.0) -> list[Any]:
    """Run `fn(rank, *args)` on `nprocs` fresh ranks and return their results in rank order.

    Called like `torch.multiprocessing.spawn`, but `fn` may live in a notebook, results come back (tensors as
    CPU copies), and output is printed in rank order. `nprocs` is 1 to 64. After `timeout` seconds without a
    sign of life (output, progress, a rank that finishes) HangError says where each rank is; None waits for
    ever. Raises RankError for the first rank that failed, TravelError for a function or an argument that can't
    be sent. Nothing is left running in any case.
    """
    __tracebackhide__ = True  # a notebook shows the caller's cell and the rank's traceback, not these lines
    data, sources = travel.dumps_call(fn, tuple(args))
    with contextlib.closing(Pool(nprocs, once=True)) as pool:
        return pool.run("call", data, sources, timeout=timeout)


class _Rank:
    """The parent's side of one rank: its process, its pipes, and where it stands."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.control, control = torch.multiprocessing.Pipe()
        self.out, out = torch.multiprocessing.Pipe(duplex=False)
        self.dump, dump = torch.multiprocessing.Pipe(duplex=False)
        self.child_ends = (control, out, dump)
        for end in (self.out, self.dump):
            os.set_blocking(end.fileno(), False)
        self.process: Any = None
        self.gone = -1  # readable once the process has ended
        self.started = False
        self.busy = False  # has a command to answer; of a launch: its process has not ended
        self.open: list[Connection] = []  # pipes to wait on
        self.result: bytes | None = None
        self.failure: report.Failure | None = None

    def read(self, end: Connection) -> bytes:
        """Return what waits in `out` or `dump`, up to a few MB: a rank may print faster than this reads."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while len(data) < 1 << 22 and (chunk := os.read(end.fileno(), 1 << 20)):
                data += chunk
        return data

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # its process has ended: noticed elsewhere
            self.control.send(message)

    def where(self) -> str:
        """Return the stacks of a rank that is stuck, be it in C++ or holding the GIL; "" where that can't be asked."""
        if not hasattr(signal, "SIGUSR2"):
            return ""
        self.read(self.dump)
        os.kill(self.process.pid, signal.SIGUSR2)
        text = b""
        while not text.endswith(DUMP_ENDS) and wait([self.dump], 0.5) and (chunk := self.read(self.dump)):
            text += chunk
        return text.decode(errors="replace")


class _Ends:
    """The ranks' ends of the pipes: spawn pickles its arguments once per rank, in rank order."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self.ends = iter([r.child_ends for r in ranks])

    def __reduce__(self) -> Any:
        return tuple, (next(self.ends),)


class Pool:
    """Ranks that carry out one command at a time; `launch` and `Ranks` stand on it."""

    def __init__(self, nprocs: int, *, once: bool = False) -> None:
        if isinstance(nprocs, bool) or not isinstance(nprocs, int) or not 1 <= nprocs <= 64:
            raise ValueError(f"nprocs is the number of ranks, a whole number from 1 to 64, not {nprocs!r}")
        if child.IN_A_RANK:
            raise RuntimeError(
                "a rank can't start ranks, and this process is a rank. In a script, call this under "
                "if __name__ == '__main__': (each rank imports the script); in a notebook, in a cell without %%ranks."
            )
        self.once, self.ended = once, ""
        self.ranks = [_Rank(rank) for rank in range(nprocs)]
        self._stores: dict[int, tuple[dist.TCPStore, int]] = {}
        self._new_stores: dict[int, tuple[dist.TCPStore, int]] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()  # one at a time reads the dump pipes
        self._screen = report.Screen(nprocs)
        self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._guard: subprocess.Popen | None = None
        self._folder = tempfile.mkdtemp(prefix="pymp-")  # where multiprocessing, in the ranks, puts its sockets
        self._address = socket.socket()  # bound, never listening: MASTER_PORT while it is the launcher's
        self._address.bind(("127.0.0.1", 0))
        try:
            with _Interrupts():
                self._start()
        except BaseException:
            self._end("did not start")
            self._release()
            raise

    def _start(self) -> None:
        nprocs, port = len(self.ranks), self._address.getsockname()[1]
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // nprocs))
        multiprocessing.resource_tracker.ensure_running()  # Python's own, shared by all: not one of ours
        with _spawning:
            if sys.platform == "linux":
                command = [sys.executable, "-I", "-S", reaper.__file__, self._mark, str(os.getpid()), self._folder]
                self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            with _environment({child.MARK: self._mark, "OMP_NUM_THREADS": threads}):
                args = (_Ends(self.ranks), nprocs, self.once, port, self._folder)
                context = torch.multiprocessing.spawn(child.main, args=args, nprocs=nprocs, join=False)
        for r, process in zip(self.ranks, context.processes, strict=True):
            r.process, r.gone, r.open = process, _end_of(process), [r.control, r.out]
            for end in r.child_ends:
                end.close()
        if self._guard is not None:
            self._guard.stdin.write(" ".join(str(r.process.pid) for r in self.ranks).encode())  # type: ignore[union-attr]
            self._guard.stdin.flush()  # type: ignore[union-attr]

    def run(self, command: str, *message: Any, timeout: float | None) -> list[Any]:
        """Send one command to all ranks, show what they print, and return the results in rank order."""
        __tracebackhide__ = True
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the ranks are busy with another cell: wait for it or interrupt it")
        try:
            self._check()
            self._new_stores = {}
            screen = self._screen = report.Screen(len(self.ranks))
            with _Interrupts() as interrupts:
                try:
                    senders = []
                    for r in self.ranks:
                        r.busy, r.result, r.failure = True, None, None
                        if any(len(part) > PIPE for part in message):  # a rank that doesn't read must not stop this
                            senders.append(threading.Thread(target=r.tell, args=(command, *message), daemon=True))
                            senders[-1].start()
                        else:
                            r.tell(command, *message)
                    error = self._supervise(timeout, screen, interrupts)
                except BaseException as problem:  # a stdout that fails, say: what the ranks answer would be mistaken
                    self._end(f"{type(problem).__name__} while a cell ran on them")
                    raise
                finally:
                    for r in self.ranks:
                        screen.feed(r.rank, r.read(r.out))
                    screen.close()
                    for sender in senders:
                        sender.join()
            if error is not None:
                raise error
            return [travel.rebuild(r.result, r.rank) for r in self.ranks if r.result is not None]
        finally:
            if self.ended:
                self._release()
            self._lock.release()

    def _check(self) -> None:
        __tracebackhide__ = True
        for r in self.ranks:
            if r.started and not self.ended and not r.process.is_alive():
                self._end(f"rank {r.rank} {report.how_it_ended(r.process.exitcode)}")
                self._release()
        if self.ended:
            raise RuntimeError(
                f"the ranks have ended: {self.ended.rstrip('.')}. ranks.restart() starts new ones; "
                "then run from the first %%ranks cell."
            )

    def _supervise(
        self, timeout: float | None, screen: report.Screen, interrupts: "_Interrupts"
    ) -> BaseException | None:
        """Serve the ranks until all have answered; return what went wrong, with the ranks ended where it must be."""
        life = time.monotonic()  # the last sign of it
        give_up = float("inf")  # when to stop waiting for the other ranks
        while busy := [r for r in self.ranks if r.busy]:
            limit = timeout if all(r.started for r in self.ranks) else START_SECONDS
            deadline = life + (float("inf") if limit is None else limit)
            pause = max(0.0, min(give_up, deadline, life + 3600.0) - time.monotonic())
            pipes = [pipe for r in busy for pipe in r.open]
            ready = wait([*pipes, *(r.gone for r in busy), interrupts.pipe], pause)
            if interrupts.pipe in ready:
                if not interrupts.taken:
                    give_up = time.monotonic() + INTERRUPT_SECONDS
                    for r in busy:
                        os.kill(r.process.pid, signal.SIGINT)
                interrupts.take()
            for r in busy:
                if r.out in ready or r.control in ready or r.gone in ready:
                    self._listen(r, r.gone in ready, screen)
                    life = time.monotonic()
            failures = [r.failure for r in self.ranks if r.failure]
            if failures and not interrupts.taken:
                known = any(not f.consequence for f in failures)
                patience = CAUSE_SECONDS if self.once and known else BACK_SECONDS
                give_up = min(f.when for f in failures) + patience
            if time.monotonic() > give_up:
                break
            if not ready and limit is not None and time.monotonic() > deadline:
                return self._hang(limit)
        return self._judge(interrupts)

    def _listen(self, r: _Rank, process_ended: bool, screen: report.Screen) -> None:
        """Take in what a rank wrote and sent, and notice when it has answered or its process has ended."""
        answered = False
        try:
            while r.control in r.open and r.control.poll():
                kind, *data = r.control.recv()
                if kind == "ready":
                    r.started = True
                elif kind == "store":
                    r.control.send(self._store(*data))
                elif kind == "progress" and r.rank == 0:
                    screen.bar.show(*data)
                elif kind == "done":
                    r.result, answered = data[0], True
                elif kind == "failed":
                    r.failure, answered = report.Failure(r.rank, **data[0]), True
        except (EOFError, ConnectionError):
            r.open.remove(r.control)  # the rank closed it, or its process has ended
        if process_ended:
            r.process.join()
            if not answered and r.result is None and r.failure is None:
                stack = r.read(r.dump) if -(r.process.exitcode or 0) in CRASHES else b""  # else a child's, if any
                place = report.read_stack(stack.decode(errors="replace"))[1]
                ended = report.how_it_ended(r.process.exitcode, r.started)
                r.failure = report.Failure(r.rank, time.monotonic(), place=place, ended=ended)
        text = r.read(r.out)
        screen.feed(r.rank, text)
        if not text and not process_ended and r.out in r.open and wait([r.out], 0):
            r.open.remove(r.out)  # end of file: the rank closed its output
        if process_ended or (answered and not self.once):
            r.busy = False
            screen.finish(r.rank)

    def _store(self, number: int) -> int:
        """Return the port of the store for the current command's `number`-th initialisation."""
        if number not in self._new_stores:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                len(self.ranks),
                True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self._new_stores[number] = store, port
            self._stores = self._new_stores  # those of an earlier command are not needed any more
        return self._new_stores[number][1]

    def _judge(self, interrupts: "_Interrupts") -> BaseException | None:
        """Return None if every rank delivered a result, else the error; end ranks that are not at their prompt."""
        late = [r for r in self.ranks if r.busy]
        dead = [r for r in self.ranks if r.failure and r.failure.ended]
        failures = [r.failure for r in self.ranks if r.failure]
        if interrupts.taken:
            kept = "the ranks kept their variables, but a process group may be broken: destroy it and initialise again"
            if late or dead:
                self._end("they were interrupted and did not come back")
                kept = "the ranks did not come back and were ended: ranks.restart() starts new ones"
            return KeyboardInterrupt("" if self.once else kept)
        if not failures:
            return None
        error = report.error_from(failures, [r.rank for r in self.ranks if r.result is not None])
        if late or dead:
            self._end(
                str(error) if not late else f"{error}; rank {late[0].rank} was still running {BACK_SECONDS:g} s later"
            )
        return error

    def where(self) -> list[tuple[str, str]]:
        """Return for each rank what it does, and its stack (innermost frame last) while it runs a command."""
        found = []
        with self._looking:
            for r in self.ranks:
                if self.ended or not r.busy:
                    found.append(("has ended" if self.ended else "failed" if r.failure else "finished", ""))
                elif not r.started:
                    found.append(("has not started", ""))
                else:
                    state, _, stack = report.read_stack(r.where())
                    found.append((state, stack))
        return found

    def waiting_output(self, rank: int) -> str:
        """Return what a rank printed that is not shown yet, because a rank before it is still running."""
        return self._screen.lines[rank].waiting()

    def _hang(self, limit: float) -> report.HangError:
        error = report.hang_error(limit, self.where())
        self._end(str(error).split("\n")[0])
        return error

    def close(self) -> None:
        """End the ranks: those at their prompt leave by themselves, what is left after 1.5 s is killed."""
        if not self._mark.startswith(f"{os.getpid()}-"):
            return  # a forked child of the process that they belong to
        with _Interrupts():
            if not self.ended:
                idle = [r for r in self.ranks if r.started and not r.busy and r.process.is_alive()]
                for r in idle:
                    r.tell("leave")
                end = time.monotonic() + 1.5
                for r in idle:
                    wait([r.gone], max(0.0, end - time.monotonic()))
                self._end("they were closed")
            self._release()

    def _end(self, reason: str) -> None:
        """Kill the ranks and all that they started. Their last output can still be read."""
        self.ended = self.ended or reason
        reaper.end_marked(self._mark, [r.process.pid for r in self.ranks if r.process is not None])
        for r in self.ranks:
            if r.process is not None:
                r.process.kill()  # where the mark can't be read
                r.process.join()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()

    def _release(self) -> None:
        """Close what this process held for the ranks."""
        self._stores, self._new_stores, self._guard = {}, {}, None
        self._address.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for r in self.ranks:
            for end in (r.control, r.out, r.dump, *r.child_ends):
                end.close()
            if r.process is not None:
                if r.gone != r.process.sentinel:
                    os.close(r.gone)
                r.process.close()
            r.process, r.open = None, []


class _Interrupts:
    """Turns SIGINT into a byte in `pipe`, so that no exception cuts a message or a clean-up in two."""

    def __enter__(self) -> "_Interrupts":
        self.taken = False
        self.pipe, self._write = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(self._write, False)
        main = threading.current_thread() is threading.main_thread()
        self._old = signal.getsignal(signal.SIGINT) if main else None
        if callable(self._old):
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"!")

    def take(self) -> bool:
        """Return whether an interrupt came, and forget it."""
        with contextlib.suppress(BlockingIOError):
            self.taken = bool(os.read(self.pipe, 1000)) or self.taken
        return self.taken

    def __exit__(self, kind: Any, *_: Any) -> None:
        if callable(self._old):
            signal.signal(signal.SIGINT, self._old)
        unseen = not self.taken and self.take()
        os.close(self.pipe)
        os.close(self._write)
        if unseen and kind is None:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Change this process's environment for a moment, and hold interrupts back from those that start in it."""
    old = {name: os.environ.get(name) for name in values}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if hasattr(signal, "pthread_sigmask") else None
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_of(process: Any) -> int:
    """Return what is readable once a process has ended. Its sentinel waits for the children that it forked, too."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(process.pid)
    return process.sentinel


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
