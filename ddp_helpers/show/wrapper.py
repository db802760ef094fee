"""Weights that drift apart, and the buckets of a wrapper (needs matplotlib; copy style.py with it)."""

from collections.abc import Sequence

import matplotlib.pyplot as plt

from .style import INK, PHASE, RANK, canvas


def gap(distances: Sequence[float], event: int, text: str) -> None:
    """Draw the largest difference between the ranks' weights after each step, with an arrow at step `event`."""
    _, axes = canvas(6, 2.4)
    axes.plot(range(len(distances)), distances, "o-", color=RANK[5])
    axes.annotate(
        text,
        (event, distances[event]),
        (max(0, event - 1.6), max(distances) * 0.75),
        color=INK,
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    axes.set(xlabel="optimizer step", ylabel="largest difference\nbetween the ranks", xticks=range(len(distances)))
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def buckets(sizes: Sequence[int]) -> None:
    """Draw the buckets of a wrapper in the order in which they are sent; sizes in bytes."""
    _, axes = canvas(7, 1.3)
    left = 0.0
    for number, size in enumerate(sizes):
        width = size / 1e6
        axes.barh(0, width, left=left, color=PHASE["communication"], edgecolor="white", linewidth=2)
        axes.text(left + width / 2, 0, f"bucket {number}", ha="center", va="center", color="white", fontsize=9)
        left += width
    axes.set(xlabel="MB, in the order of sending", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    plt.show()
