"""Which rank sees which sample in which batch, as a coloured grid (needs matplotlib; copy style.py with it)."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from .style import INK, RANK, canvas


def sampler_grid(dealt: Sequence[Sequence[Sequence[int]]], n: int) -> None:
    """Draw `dealt[rank][batch]`, lists of sample indices, and above them the data set of n samples.

    A sample that two ranks (or one rank twice) got is hatched; one that nobody got is grey.
    """
    longest = max((sum(map(len, batches)) + len(batches) - 1 for batches in dealt), default=1)
    width = max(n, longest)
    _, axes = canvas(min(9.0, 0.42 * width + 1.6), 0.5 * (len(dealt) + 2) + 0.2)
    owner = {index: rank for rank in reversed(range(len(dealt))) for batch in dealt[rank] for index in batch}
    for index in range(n):
        _cell(axes, index, 0.0, index, RANK[owner[index]] if index in owner else "#DDDDDD")
    seen: set[int] = set()
    for rank, batches in enumerate(dealt):
        x, y = 0, -1.5 - 1.1 * rank
        for batch in batches:
            for index in batch:
                _cell(axes, x, y, index, RANK[rank], repeated=index in seen)
                seen.add(index)
                x += 1
            x += 1
        axes.text(-0.35, y + 0.45, f"rank {rank}", ha="right", va="center", color=RANK[rank], fontweight="bold")
    axes.text(-0.35, 0.45, "data set", ha="right", va="center", color=INK)
    axes.set(xlim=(-3.2, width + 0.2), ylim=(-1.7 - 1.1 * (len(dealt) - 1), 1.1), aspect="equal")
    axes.axis("off")
    plt.show()


def _cell(axes: plt.Axes, x: float, y: float, index: int, colour: str, repeated: bool = False) -> None:
    hatch = "////" if repeated else None
    axes.add_patch(Rectangle((x, y), 0.94, 0.9, facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0))
    box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6} if repeated else None
    ink = "white" if colour in ("#0072B2", "#009E73", "#D55E00") else INK
    axes.text(x + 0.47, y + 0.45, str(index), ha="center", va="center", fontsize=8, color=ink, bbox=box)
