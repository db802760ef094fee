"""What ranks run in the benchmarks: importing it costs nothing."""

from collections.abc import Sequence
from multiprocessing.connection import Connection


def nothing(*_: object) -> None:
    """Do nothing, on every rank."""


def answer(rank: int, ends: Sequence[Connection]) -> None:
    """Say that this rank has run."""
    ends[rank].send(rank)
