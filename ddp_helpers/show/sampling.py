"""Which rank sees which sample in which batch, as a coloured grid (needs matplotlib; copy style.py with it)."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from .style import INK, RANK, canvas

GAP = 0.5  # between two batches, in cells


def sampler_grid(dealt: Sequence[Sequence[Sequence[int]]], n: int) -> None:
    """Draw `dealt[rank][batch]`, lists of sample indices, and above them the data set of n samples.

    The batches of all ranks in one column make one step. A sample that was dealt before, to any rank, is hatched; one
    that nobody got is empty, with a dotted edge.
    """
    steps = max((len(batches) for batches in dealt), default=0)
    widths = [max(len(batches[step]) for batches in dealt if step < len(batches)) for step in range(steps)]
    lefts = [sum(widths[:step]) + step * GAP for step in range(steps)]
    width = max(n, sum(widths) + max(0, steps - 1) * GAP, 10)
    bottom = -0.7 - 1.1 * len(dealt)
    figure_width = min(9.0, 0.42 * (width + 2.6))
    size = min(8.0, 20 * figure_width / (width + 2.6))  # of the numbers, in points

    _, axes = canvas(figure_width, figure_width * (1.9 - bottom) / (width + 2.6))
    owners: dict[int, int] = {}
    repeats = 0
    for rank, batches in enumerate(dealt):
        colour, y = RANK[rank % len(RANK)], -1.7 - 1.1 * rank
        axes.text(-0.3, y + 0.45, f"rank {rank}", ha="right", va="center", fontsize=9, color=colour, fontweight="bold")
        for left, batch in zip(lefts, batches, strict=False):
            for place, index in enumerate(batch):
                _cell(axes, left + place, y, str(index), colour, size, "again" if index in owners else "first")
                repeats += index in owners
                owners.setdefault(index, rank)
    for step, (left, wide) in enumerate(zip(lefts, widths, strict=True)):
        axes.text(left + wide / 2, -0.4, f"step {step}", ha="center", va="center", fontsize=8, color=INK)

    axes.text(-0.3, 0.45, "data set", ha="right", va="center", fontsize=9, color=INK)
    for index in range(n):
        kind = "first" if index in owners else "never"
        _cell(axes, index, 0.0, str(index), RANK[owners.get(index, 0) % len(RANK)], size, kind)
    legend = ["colour: the rank that gets it first"]
    legend += ["hatched: dealt once more"] * (repeats > 0) + ["dotted: dealt to nobody"] * (len(owners) < n)
    axes.text(0, 1.35, "; ".join(legend), ha="left", va="center", fontsize=8, color="#555555")
    axes.set(xlim=(-2.5, width + 0.1), ylim=(bottom, 1.7), aspect="equal")
    axes.axis("off")
    plt.show()


def _cell(axes: Axes, x: float, y: float, text: str, colour: str, size: float, kind: str) -> None:
    """Draw one sample: filled the first time, hatched when it comes `again`, dotted when it `never` comes."""
    fill, edge, line = {"first": (colour, colour, "-"), "again": ("white", colour, "-"), "never": ("white", INK, ":")}[
        kind
    ]
    axes.add_patch(
        Rectangle((x + 0.05, y + 0.03), 0.86, 0.86, facecolor=fill, edgecolor=edge, linestyle=line, linewidth=1)
    )
    if kind == "again":
        axes.add_patch(
            Rectangle((x + 0.05, y + 0.03), 0.86, 0.86, fill=False, edgecolor=edge, linewidth=0, hatch="////")
        )
    ink = "white" if kind == "first" and colour in ("#0072B2", "#009E73", "#D55E00") else INK
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if kind == "again" else None
    axes.text(x + 0.48, y + 0.45, text, ha="center", va="center", fontsize=size, color=ink, bbox=box)
