"""Live ranks: processes that keep their variables between notebook cells, and the %%ranks magic."""

import argparse
import ast
import shlex
import sys
import weakref
from collections.abc import Callable
from typing import Any

from . import report, travel
from .launch import Pool

_open: "list[weakref.ref[Ranks]]" = []  # the newest last


class Ranks:
    """Start `nprocs` ranks that stay, each with a namespace of its own.

    `%%ranks` cells run in that namespace on all ranks; `run`, `push` and `pull` call a function, send
    variables out and bring values home. `timeout` is the number of seconds without a sign of life (output,
    progress, a rank that finishes) after which HangError says where each rank is; None waits for ever.
    The ranks keep the modules that they imported until `restart()`. Use it as a context manager, or `close()`.
    """

    def __init__(self, nprocs: int = 2, *, timeout: float | None = 120.0) -> None:
        self.timeout = timeout
        self._start(nprocs)

    def _start(self, nprocs: int) -> None:
        self._pool = Pool(nprocs)
        self._finalizer = weakref.finalize(self, self._pool.close)  # runs at exit, too
        _open[:] = [ref for ref in _open if ref() not in (None, self)] + [weakref.ref(self)]

    def __len__(self) -> int:
        return len(self._pool.ranks)

    def __repr__(self) -> str:
        return f"Ranks({len(self)}{', ended' if self._pool.ended else ''})"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order (tensors as CPU copies)."""
        __tracebackhide__ = True
        return self._pool.run("call", *travel.dumps_call(fn, args), timeout=self.timeout)

    def push(self, **variables: Any) -> None:
        """Send variables to every rank; each rank gets its own copy under the given name."""
        self._pool.run("push", travel.dumps(variables)[0], timeout=self.timeout)

    def pull(self, *names: str) -> Any:
        """Return a variable's value on every rank, as a list in rank order; for several names, a tuple of lists.

        A name may be an expression, like "model.weight". Tensors come as CPU copies.
        """
        for name in names:
            ast.parse(name, "pull", mode="eval")
        __tracebackhide__ = True
        values = [self._pull(name) for name in names]
        return values[0] if len(names) == 1 else tuple(values)

    def _pull(self, name: str) -> list[Any]:
        __tracebackhide__ = True
        try:
            return self._pool.run("pull", name, timeout=self.timeout)
        except report.RankError as error:
            if error.type == "NameError":
                text = f"rank {error.rank} has no variable '{error.name}'"
                error.args = (f"{text}: assign it in a %%ranks cell that every rank runs",)
            raise

    def execute(self, source: str, label: str = "cell", *, timeout: float | None = None) -> None:
        """Run plain Python code in every rank's namespace, as a %%ranks cell does; `label` names it in tracebacks."""
        __tracebackhide__ = True
        check_source(source, label)
        try:
            self._pool.run("cell", source, label, timeout=timeout or self.timeout)
        except report.RankError as error:
            if error.type == "NameError" and error.name and error.name in _notebook():
                name = error.name
                error.args = (f"{error} ('{name}' lives in the notebook: ranks.push({name}={name}) sends it)",)
            raise

    def where(self) -> str:
        """Return what each rank does now, its stack, and what it printed that is not shown yet.

        Any thread may ask while a cell runs on the ranks, and nothing is disturbed by it.
        """
        parts = []
        for rank, (state, stack) in enumerate(self._pool.where()):
            waiting = self._pool.waiting_output(rank)
            parts.append("\n".join(filter(None, [f"rank {rank} {state}", stack, waiting.rstrip("\n")])))
        return "\n".join(parts)

    def restart(self, nprocs: int | None = None) -> None:
        """End the ranks and start new ones, with empty namespaces and freshly imported modules."""
        self.close()
        self._start(nprocs or len(self))

    def close(self) -> None:
        """End the ranks and all that they started."""
        self._finalizer()


def check_source(source: str, name: str) -> None:
    """Raise SyntaxError, before any rank sees it, for what is not plain Python."""
    try:
        compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        if line.startswith(("!", "%")) or "await" in str(error):
            error.msg = f"{error.msg}: a %%ranks cell takes plain Python only, no !, % or await"
        raise


def _newest() -> Ranks | None:
    """Return the newest Ranks that were not closed."""
    alive = [ranks for ref in _open if (ranks := ref()) is not None and ranks._finalizer.alive]
    return alive[-1] if alive else None


def _notebook() -> dict[str, Any]:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell.user_ns if shell is not None else {}


def _running_cell() -> str:
    """Return the label of the notebook cell that is on the call stack."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if label := travel.cell_label(frame.f_code.co_filename):
            return label
    return "cell"


def load_ipython_extension(shell: Any) -> None:
    """Make `%%ranks` known: `%%ranks [NAME] [--timeout SECONDS]` runs the cell on the newest or the named Ranks."""
    parser = argparse.ArgumentParser("%%ranks", exit_on_error=False, add_help=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--timeout", type=float)

    def ranks_magic(line: str, cell: str) -> None:
        """Run this cell on every live rank."""
        __tracebackhide__ = True
        options = parser.parse_args(shlex.split(line))
        ranks = shell.user_ns.get(options.name) if options.name else _newest()
        if not isinstance(ranks, Ranks):
            name = options.name or "ranks"
            raise RuntimeError(f"there are no live ranks: run `{name} = Ranks(2)` in a cell first")
        ranks.execute("\n" + cell, _running_cell(), timeout=options.timeout)

    def hint(result: Any) -> None:
        error, ranks = result.error_in_exec, _newest()
        name = error.name if isinstance(error, NameError) else None
        if name and ranks and not ranks._pool.ended and any(ranks.pull(f"{name!r} in globals()")):
            print(f"'{name}' lives on the ranks: ranks.pull('{name}') brings it home")

    shell.register_magic_function(ranks_magic, "cell", "ranks")
    shell.events.register("post_run_cell", hint)
