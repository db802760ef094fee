"""The child's side: one process per rank that serves the notebook's commands until it is told to leave."""

import ast
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import linecache
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Sized
from typing import Any, NoReturn, TypeVar

from . import travel

MARK = "DDP_HELPERS_MARK"  # in the environment of every process that the launcher started
IN_A_RANK = MARK in os.environ  # looked at once: a launch in another thread sets it for a moment
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was (likely )?(closed|lost)|recvvalue failed", re.I
)
HERE = os.path.dirname(os.path.abspath(__file__))
T = TypeVar("T")

_link: Any = None  # the control connection to the notebook, in a rank
_send_lock = threading.Lock()
_busy = False  # whether a command runs: only then does an interrupt reach it
_stores = 0  # process groups initialised by the current command


def platform() -> dict[str, Any]:
    """Return what differs by operating system: loopback interface, environment, whether ranks may fork."""
    if sys.platform == "win32":
        return {"interface": None, "environ": {"USE_LIBUV": "0"}, "fork": False}
    return {
        "interface": "lo0" if sys.platform == "darwin" else "lo",
        "environ": {},
        "fork": sys.platform == "linux",
    }


def main(rank: int, ends: Any, world_size: int, once: bool, port: int, folder: str) -> NoReturn:
    """Run as rank `rank` until told to leave. Never returns, and never raises into torch's wrapper."""
    try:
        _live(rank, ends, world_size, once, port, folder)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _live(rank: int, ends: Any, world_size: int, once: bool, port: int, folder: str) -> NoReturn:
    """Set torchrun's variables, catch all output, serve commands."""
    global _link
    control, out, dump = ends
    _link = control
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt of the notebook's process group is not one of the ranks
        _no_death_signal()
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(dump.fileno())
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, dump.fileno())
    signal.signal(signal.SIGINT, _interrupt)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_link)
    if platform()["fork"]:
        multiprocessing.set_start_method("fork", force=True)  # DataLoader workers know the rank's __main__
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    _set_environment(rank, world_size, port)
    _meet_at_fresh_stores(port)
    namespace = _new_main()
    _send("ready")
    while True:
        if not once and not control.poll(0.5):
            _import_ahead(control)
        command, *message = control.recv()
        if command != "leave":
            _serve(command, message, namespace, rank if once else None)
        if once or command == "leave":
            _leave(dump)


def _import_ahead(control: Any) -> None:
    """Import what the first DDP() needs, 1 s, while nobody waits; in parts: a cell that comes waits for one."""
    for name in ("sympy", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp", "torch._dynamo"):
        if not control.poll():
            importlib.import_module(name)


def _no_death_signal() -> None:
    """Undo torch's parent-death signal: it fires when the starting thread ends. The guard does better."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 0)


def _forget_link() -> None:
    """A forked child is no rank: it neither speaks on the control connection nor keeps it open."""
    global _link
    if _link is not None:
        _link.close()
        _link = None


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _set_environment(rank: int, world_size: int, port: int) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    here = platform()
    if here["interface"]:
        os.environ.update(GLOO_SOCKET_IFNAME=here["interface"], NCCL_SOCKET_IFNAME=here["interface"])
    os.environ.update(
        here["environ"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        MPLBACKEND="Agg",
    )


def _meet_at_fresh_stores(port: int) -> None:
    """Make env:// meet at a store that the notebook opens anew for each initialisation.

    Only where MASTER_ADDR and MASTER_PORT are still those that the launcher set: a worker with an endpoint
    of its own is left alone.
    """
    from torch.distributed.rendezvous import _rendezvous_handlers

    original = _rendezvous_handlers["env"]

    def env(url: str, **options: Any) -> Iterator[Any]:
        global _stores
        if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != ("127.0.0.1", str(port)):
            yield from original(url, **options)
            return
        _stores += 1
        with _uninterrupted():
            _send("store", _stores)
            fresh = _link.recv()
        os.environ.update(MASTER_PORT=str(fresh), TORCHELASTIC_USE_AGENT_STORE="True")
        try:
            met = next(original(url, **options))
        finally:
            os.environ["MASTER_PORT"] = str(port)
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        yield met

    _rendezvous_handlers["env"] = env


def _new_main() -> dict[str, Any]:
    """Give the rank a fresh `__main__` module, in which cells run and whose classes pickle."""
    module = types.ModuleType("__main__")
    module.__file__ = "<cells>"
    sys.modules["__main__"] = module
    module.display = lambda *values: print(*map(repr, values), sep="\n")  # type: ignore[attr-defined]
    builtins.input = _no_input
    sys.breakpointhook = _no_input
    return module.__dict__


def _no_input(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a rank can't ask questions: input() and breakpoint() work in the notebook only")


def _serve(command: str, message: list[Any], namespace: dict[str, Any], rank: int | None) -> None:
    """Carry out one command and send back how it went: done with a result, or failed with the reason.

    `rank` is the first argument of a launched function, and None on live ranks.
    """
    global _busy, _stores
    _busy, _stores = True, 0
    result: Any = None
    answer: Any
    try:
        if command == "call":
            data, sources = message
            _remember(sources)
            function, args = travel.loads(data)
            result = function(*args) if rank is None else function(rank, *args)
        elif command == "cell":
            _run_cell(message[0], message[1], namespace)
        elif command == "push":
            namespace.update(travel.loads(message[0]))
        else:  # pull
            result = eval(message[0], namespace)
        try:
            answer = "done", travel.dumps(result)[0]
        except travel.TravelError as error:
            raise travel.TravelError(f"the result of type {type(result).__name__}: {error}") from None
        _busy = False
    except BaseException as error:
        _busy = False
        answer = "failed", _describe(error)
    _flush()
    if _link is None:
        os._exit(0)  # a child that the code forked came back from it
    _send(*answer)


def _remember(sources: dict[str, str]) -> None:
    """Put cell sources where tracebacks and `inspect` find them; the newest comes first in <cells>."""
    for label, text in sources.items():
        linecache.cache[label] = (len(text), None, text.splitlines(True), label)
        old = linecache.cache.get("<cells>")
        both = text + "\n" + ("".join(old[2]) if old else "")  # type: ignore[misc]
        linecache.cache["<cells>"] = (len(both), None, both.splitlines(True), "<cells>")


def _run_cell(source: str, label: str, namespace: dict[str, Any]) -> None:
    _remember({label: source})
    tree = ast.parse(source, label)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, label, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        quiet = source.rstrip().endswith(";")
        shown: Any = ast.Expression(last.value) if quiet else ast.Interactive([last])
        eval(compile(shown, label, "eval" if quiet else "single", dont_inherit=True), namespace)


def _describe(error: BaseException) -> dict[str, Any]:
    """Return what the notebook must know of an exception, as plain data.

    A lost connection may hide the error during whose handling it came up (in a `finally`), and the other way round.
    """
    when = time.monotonic()
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and len(chain) < 50:
        chain.append(before)
    consequence = _lost_peer(chain[-1])
    error = next((e for e in chain if not _lost_peer(e)), error)
    trace = error.__traceback__
    while trace and os.path.dirname(trace.tb_frame.f_code.co_filename) == HERE:
        trace = trace.tb_next
    place = user_frame([(f.filename, f.lineno or 0) for f in traceback.extract_tb(trace)])
    if isinstance(error, SyntaxError) and not place:
        place = (error.filename or "", error.lineno or 0)
    return {
        "type": type(error).__name__,
        "message": _text(error),
        "consequence": consequence,
        "name": getattr(error, "name", None) if isinstance(error, NameError) else None,
        "place": place,
        "when": when,
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"(its text can't be shown: {type(problem).__name__})"


def _lost_peer(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, OSError)) and bool(LOST_PEER.search(_text(error)))


def user_frame(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost (file, line) in a notebook cell, else outside installed libraries, else the last."""
    libraries = (os.path.dirname(os.__file__), HERE, "<")
    cells = [f for f in frames if f[0].startswith("cell ")]
    own = [f for f in frames if not f[0].startswith(libraries) and "site-packages" not in f[0]]
    found = cells or own or frames
    return found[-1] if found else None


def _interrupt(*_: Any) -> None:
    if _busy:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold interrupts back: half a message on the control connection would be worse."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _send(*message: Any) -> None:
    with _uninterrupted(), _send_lock:
        _link.send(message)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C and C++ code printed


def _leave(dump: Any) -> NoReturn:
    """End without the interpreter's shutdown, which aborts after DDP on gloo; atexit handlers get 1 s."""
    faulthandler.dump_traceback_later(1.0, exit=True, file=dump.fileno())  # needs no GIL
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def progress(iterable: Iterable[T], text: str = "") -> Iterator[T]:
    """Iterate, and show rank 0's progress as a bar in the notebook while the cell runs.

    Any rank may call it; the bar is live in JupyterLab and in a terminal and leaves nothing behind. Outside
    a rank it only iterates.
    """
    total = len(iterable) if isinstance(iterable, Sized) else None
    shown = 0.0
    for done, item in enumerate(iterable):
        if _link is not None and time.monotonic() - shown > 0.1:
            _send("progress", done, total, text)
            shown = time.monotonic()
        yield item
    if _link is not None:
        _send("progress", total, total, text)
