"""Benchmarks as ratios: each row times ours and its reference in turn, in the same run. Run `make bench`.

A row is one decorated function in rows.py:

    @row("what is ours / what is the reference", limit=1.25)
    def my_row(size: Size) -> Iterator[Pair]:
        with something_to_start() as thing:
            yield Pair(lambda: seconds(thing.ours), lambda: seconds(thing.reference))

This module imports the standard library only: ranks that `python -m tests.bench` starts import it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

HEAD = ("ours", "reference", "ratio", "limit", "")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much work a row does; SMALL is for tests of the rows themselves."""

    nprocs: int = 2  # ranks
    calls: int = 200  # per measurement, where one call is too short to time
    idle: float = 2.5  # seconds before the first DDP()
    images: int | None = None  # of the training set; None: all


SMALL = Size(nprocs=1, calls=2, idle=0.1, images=256)


@dataclasses.dataclass(frozen=True)
class Pair:
    """What a row compares: `ours` and `reference` measure once and return seconds; `note` is printed below."""

    ours: Callable[[], float]
    reference: Callable[[], float] | None = None
    note: str = ""


class Missing(Exception):
    """A row can't be measured here; the message is a sentence that says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: `limit` bounds the ratio, `limit_ms` our own time in milliseconds."""

    name: str
    measure: Callable[[Size], Iterator[Pair]]
    limit: float | None = None
    limit_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured for one row: medians in seconds, the median of the pairs' ratios, and all of the numbers."""

    name: str
    limit: str = ""
    ours: float | None = None
    reference: float | None = None
    ratio: float | None = None
    verdict: str = ""
    note: str = ""
    all_ours: Sequence[float] = ()
    all_reference: Sequence[float] = ()


ROWS: list[Row] = []


def row(name: str, *, limit: float | None = None, limit_ms: float | None = None) -> Callable[..., Any]:
    """Add the decorated function, a generator that yields one Pair, to the table."""

    def add(measure: Callable[[Size], Iterator[Pair]]) -> Callable[[Size], Iterator[Pair]]:
        ROWS.append(Row(name, measure, limit, limit_ms))
        return measure

    return add


def seconds(fn: Callable[..., Any], *args: Any, calls: int = 1) -> float:
    """Return how many seconds `fn(*args)` takes: the median of `calls` calls."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        fn(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(row: Row, pairs: int, size: Size) -> Result:
    """Measure one row in `pairs` interleaved pairs: ours, reference, ours, reference, ..."""
    ours: list[float] = []
    reference: list[float] = []
    limit = f"{row.limit:g}" if row.limit else f"{row.limit_ms:g} ms" if row.limit_ms else ""
    try:
        with contextlib.contextmanager(row.measure)(size) as pair:
            for _ in range(pairs):
                ours.append(pair.ours())
                if pair.reference is not None:
                    reference.append(pair.reference())
    except Missing as reason:
        return Result(row.name, limit, verdict="skipped", note=str(reason))
    found = statistics.median(ours)
    ratio = statistics.median(a / b for a, b in zip(ours, reference, strict=True)) if reference else None
    over = [value > bound for value, bound in ((ratio, row.limit), (1000 * found, row.limit_ms)) if bound and value]
    verdict = ("OVER" if any(over) else "ok") if over else ""
    base = statistics.median(reference) if reference else None
    return Result(row.name, limit, found, base, ratio, verdict, pair.note, ours, reference)


def duration(value: float | None) -> str:
    """Return seconds as text with a unit and three digits."""
    if value is None:
        return "-"
    number, unit = (value, "s") if value >= 0.9995 else (1000 * value, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def line(name: str, cells: Sequence[str], width: int) -> str:
    """Return one aligned line of the table."""
    return (f"{name:<{width}}" + "".join(f"{cell:>11}" for cell in cells[:-1]) + f"  {cells[-1]}").rstrip()


def cells(result: Result) -> tuple[str, ...]:
    """Return what the table shows of a result."""
    shown = "-"
    if result.ratio is not None:
        style = "#.2g" if result.ratio < 0.1 else ".2f" if result.ratio < 100 else ".0f"
        shown = format(result.ratio, style)
    return duration(result.ours), duration(result.reference), shown, result.limit, result.verdict


def load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes, or none where the platform has none."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def table(rows: Iterable[Row], pairs: int, size: Size = Size()) -> list[Result]:
    """Measure the rows, print each line as it is known, then the notes, and return the results."""
    rows, results = list(rows), []
    width = max((len(row.name) for row in rows), default=0)
    print(line("ours / reference", HEAD, width), flush=True)
    for one in rows:
        results.append(run(one, pairs, size))
        print(line(one.name, cells(results[-1]), width), flush=True)
    notes: dict[str, list[str]] = {}
    for result in results:
        notes.setdefault(result.note, []).append(result.name)
    for note, names in notes.items():
        if note:
            print(f"\n{note}" + "".join(f"\n    {name}" for name in names))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; return 1 if a row is over its limit."""
    from . import rows  # noqa: F401  (fills ROWS)

    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Time ours against references.")
    parser.add_argument("words", nargs="*", help="only rows whose name holds one of these words")
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs per row (7)")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE")
    options = parser.parse_args(argv)
    if options.pairs < 1:
        parser.error("--pairs must be 1 or more")
    chosen = [one for one in ROWS if not options.words or any(word in one.name for word in options.words)]
    if not chosen:
        parser.error("no row has that in its name; the rows are:\n" + "\n".join(one.name for one in ROWS))
    machine = {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": load(),
    }
    print(f"Medians of {options.pairs} pairs. " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    results = table(chosen, options.pairs)
    machine["load_after"] = load()
    print(f"\nload_after {machine['load_after']} (averages over 1, 5 and 15 minutes)")
    if options.json:
        saved = {"pairs": options.pairs, "machine": machine, "rows": [dataclasses.asdict(r) for r in results]}
        with open(options.json, "w") as file:
            json.dump(saved, file, indent=1)
    return int(any(result.verdict == "OVER" for result in results))
