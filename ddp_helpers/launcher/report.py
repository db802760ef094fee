"""What the reader sees: the ranks' lines in rank order, one progress bar, errors and hang reports."""

import collections
import dataclasses
import html
import os
import re
import signal
import sys
from typing import Any

from .rank import user_frame

LOST = "lost its connection after that (a consequence)"
HALF = 5_000_000  # bytes kept from the start, and from the end, of what one rank prints in one cell


class RankError(RuntimeError):
    """A rank failed. `rank`, `type` and `place` (file or cell, line) tell which, how and where."""

    rank: int | None = None
    type: str = ""
    place: tuple[str, int] | None = None
    name: str | None = None


class HangError(RankError):
    """No rank gave a sign of life before the deadline."""


class RankTraceback(Exception):
    """The failing rank's own traceback, shown above the error that it caused."""


@dataclasses.dataclass
class Failure:
    """One rank's failure: an exception (`type`, `message`) or the end of its process (`ended`)."""

    rank: int
    when: float
    type: str = ""
    message: str = ""
    place: tuple[str, int] | None = None
    traceback: str = ""
    name: str | None = None
    consequence: bool = False  # of a lost connection, so of another rank's failure
    ended: str = ""

    def headline(self) -> str:
        where = f" in {_place(self.place)}" if self.place else ""
        if self.ended:
            verb, _, reason = self.ended.partition(":")
            return f"rank {self.rank} {verb}{where}{reason and ':' + reason}"
        message = "lost its connection to another rank" if self.consequence else self.message  # exact on every run
        return f"rank {self.rank} raised {self.type}{where}" + (f": {message}" if message else "")


def _place(place: tuple[str, int]) -> str:
    return f"{os.path.basename(place[0])}, line {place[1]}"


def how_it_ended(code: int | None, started: bool = True) -> str:
    """Say how a process ended from its exit code (negative: a signal)."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (": the machine may have run out of memory" if name == "SIGKILL" else "")
    if started:
        return f"ended with exit code {code} before it delivered a result"
    return (
        f"ended with exit code {code} while it started. Each rank imports the script that it is started from: "
        "launch() and Ranks() belong under if __name__ == '__main__': there"
    )


def root_cause(failures: list[Failure]) -> Failure:
    """Return the first failure in time that is no consequence; of several alike, the lowest rank's."""
    causes = [f for f in failures if not f.consequence] or failures
    first = min(causes, key=lambda f: f.when)
    alike = [f for f in causes if (f.type, f.ended, f.place) == (first.type, first.ended, first.place)]
    return min(alike, key=lambda f: f.rank)


def error_from(failures: list[Failure], finished: list[int]) -> RankError:
    """Make the error to raise; its cause holds the failing rank's traceback and the other ranks' lines."""
    cause = root_cause(failures)
    early = f"; rank {finished[0]} had finished: did it make fewer collective calls?" if finished else ""
    error = RankError(cause.headline() + (early if cause.consequence else ""))
    error.rank, error.type, error.place, error.name = cause.rank, cause.type, cause.place, cause.name
    lines = [cause.traceback.rstrip() or cause.headline()]
    for failure in sorted(failures, key=lambda f: f.rank):
        if failure is not cause:
            lines.append(f"rank {failure.rank} {LOST}" if failure.consequence else failure.headline())
    error.__cause__ = RankTraceback("\n" + "\n".join(lines))
    return error


def read_stack(dump: str) -> tuple[str, tuple[str, int] | None, str]:
    """Read faulthandler's text: (what the main thread does, the user's file and line, the frames from there on)."""
    stacks = [re.findall(r'File "(.*)", line (\d+) in (.*)', s) for s in re.split(r"\n(?=Thread|Current thread)", dump)]
    frames = [(file, int(line), name) for file, line, name in reversed(next(filter(None, reversed(stacks)), []))]
    here = user_frame([frame[:2] for frame in frames])
    if here is None:
        return "does not answer", None, dump
    index = max(i for i, frame in enumerate(frames) if frame[:2] == here)
    inner = [name for *_, name in frames[index + 1 :]]
    names = [name for name in inner if name != "wrapper" and not name.startswith("_")] or inner
    state = (f"waits in {names[0]}, " if names else "is in ") + _place(here).replace(",", "")
    return (
        state,
        here,
        "\n".join(f'  File "{file}", line {line}, in {name}' for file, line, name in frames[index:]),
    )


def hang_error(limit: float, found: list[tuple[str, str]]) -> HangError:
    """Make the error for ranks that gave no sign of life: a line for each rank, then what to look at first."""
    lines = [f"rank {rank} {state}" for rank, (state, _) in enumerate(found)]
    error = HangError(
        f"no sign of life for {limit:g} s: {'; '.join(lines)}.\n"
        "Every rank must reach the same collective calls in the same order: compare the lines above."
    )
    parts = (f"rank {rank}, innermost frame last:\n{stack}" for rank, (_, stack) in enumerate(found) if stack)
    error.__cause__ = RankTraceback("\n" + "\n".join(parts))
    return error


class Lines:
    """What one rank printed in one cell: whole lines, carriage returns collapsed, the middle dropped above 10 MB."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.partial = prefix, b""
        self.head: list[str] = []
        self.tail: collections.deque[str] = collections.deque()
        self.head_bytes = self.tail_bytes = self.dropped = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = (self.partial + data).split(b"\n")
        for line in lines:
            self._add(line)
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        while len(rest) > HALF:  # memory is finite: such a line is cut
            self._add(rest[:HALF])
            rest = rest[HALF:]
        self.partial = rest

    def finish(self) -> None:
        if self.partial:
            self._add(self.partial)
            self.partial = b""

    def _add(self, line: bytes) -> None:
        text = self.prefix + line.decode(errors="replace").rstrip("\r").split("\r")[-1] + "\n"
        if self.head_bytes < HALF:
            self.head.append(text)
            self.head_bytes += len(text)
            return
        self.tail.append(text)
        self.tail_bytes += len(text)
        while self.tail_bytes > HALF and len(self.tail) > 1:
            self.tail_bytes -= len(self.tail.popleft())
            self.dropped += 1

    def waiting(self) -> str:
        """Return what was fed and not yet taken."""
        return "".join([*self.head, *self.tail])

    def take(self, all_of_it: bool) -> str:
        """Return what can be shown now and forget it; the end of a long output only with `all_of_it`."""
        text = "".join(self.head)
        self.head = []
        if all_of_it:
            if self.dropped:
                text += f"{self.prefix}… {self.dropped} lines dropped here …\n"
            text += "".join(self.tail)
            self.tail.clear()
            self.dropped = 0
        return text


class Screen:
    """Shows the ranks' lines in rank order, the first unfinished rank's live, and one progress bar."""

    def __init__(self, nprocs: int) -> None:
        self.lines = [Lines(f"[rank {rank}] ") for rank in range(nprocs)]
        self.finished = [False] * nprocs
        self.turn = 0
        self.bar = Bar()

    def feed(self, rank: int, data: bytes) -> None:
        self.lines[rank].feed(data)
        if rank == self.turn:
            self._show(self.lines[rank].take(False))

    def finish(self, rank: int) -> None:
        """Note that all of this rank's output has been fed."""
        self.lines[rank].finish()
        self.finished[rank] = True
        while self.turn < len(self.lines) and self.finished[self.turn]:
            self._show(self.lines[self.turn].take(True))
            self.turn += 1
        if self.turn < len(self.lines):
            self._show(self.lines[self.turn].take(False))

    def close(self) -> None:
        self.bar.close()
        for rank in range(len(self.lines)):
            self.finish(rank)

    def _show(self, text: str) -> None:
        if text:
            self.bar.hide()
            sys.stdout.write(text)
            sys.stdout.flush()
            self.bar.redraw()


class Bar:
    """One progress bar: an HTML element in JupyterLab, one line in a terminal, nothing anywhere else."""

    def __init__(self) -> None:
        self.text = ""
        self.handle: Any = None
        self.terminal = sys.stdout.isatty()

    def show(self, done: int | None, total: int | None, text: str) -> None:
        share = 0.0 if not total or done is None else done / total
        count = f"{done}/{total}" if total else f"{done}"
        self.text = f"{text} {'█' * round(20 * share):░<20} {count}".strip()
        if self.terminal:
            self.redraw()
        elif _front_end_is_live():
            from IPython.display import HTML, display

            shown = HTML(f"<pre style='margin:0'>{html.escape(self.text)}</pre>")
            if self.handle is None:
                self.handle = display(shown, display_id=True)
            else:
                self.handle.update(shown)

    def hide(self) -> None:
        if self.terminal and self.text:
            sys.stdout.write("\r\x1b[K")

    def redraw(self) -> None:
        if self.terminal and self.text:
            sys.stdout.write(f"\r\x1b[K{self.text}")
            sys.stdout.flush()

    def close(self) -> None:
        self.hide()
        self.text = ""
        if self.handle is not None:
            from IPython.display import display

            display({}, raw=True, display_id=self.handle.display_id, update=True)
            self.handle = None


def _front_end_is_live() -> bool:
    """Whether a person's front end runs this cell: JupyterLab and its kin name the cell, nbclient does not."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    try:
        return "cellId" in shell.kernel.get_parent("shell")["metadata"]  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError):
        return False
