"""The collective calls of each rank, row by row (needs matplotlib; copy style.py with it)."""

from collections.abc import Sequence
from itertools import zip_longest

import matplotlib.pyplot as plt

from .style import INK, RANK, box, canvas


def sequences(calls: Sequence[Sequence[str]]) -> None:
    """Draw the names of the collective calls that each rank makes, in order; rows that differ are marked."""
    rows = list(zip_longest(*calls, fillvalue="(none)"))
    _, axes = canvas(2.4 * len(calls) + 2.2, 0.55 * len(rows) + 0.5)
    for rank in range(len(calls)):
        axes.text(2.6 * rank + 1.2, 0.55, f"rank {rank}", ha="center", color=RANK[rank], fontweight="bold")
    for y, row in enumerate(rows):
        for rank, name in enumerate(row):
            box(axes, 2.6 * rank, -0.75 * y - 0.3, 2.4, 0.6, name, RANK[rank] if name != "(none)" else "#DDDDDD")
        if len(set(row)) > 1:
            axes.text(2.6 * len(row) + 0.1, -0.75 * y, "◀ they differ", va="center", color=INK, fontsize=10)
    axes.set(xlim=(-0.1, 2.6 * len(calls) + 1.9), ylim=(-0.75 * len(rows) + 0.3, 0.95), aspect="equal")
    axes.axis("off")
    plt.show()
