"""Bytes kept on each rank, and ranks on a device mesh (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from .style import INK, RANK, box, canvas

PARTS = {"weights": "#0072B2", "gradients": "#56B4E9", "optimizer": "#CC79A7", "buckets": "#999999"}


def memory(kinds: Mapping[str, Sequence[Mapping[str, int]]]) -> None:
    """Draw the bytes that each rank holds of weights, gradients, optimizer and buckets, for each kind of training."""
    _, axes = canvas(7, 3.2)
    labels, y = [], 0.0
    for kind, held in kinds.items():
        for rank, parts in enumerate(held):
            left = 0.0
            for name, colour in PARTS.items():
                value = parts.get(name, 0) / 1e6
                axes.barh(y, value, left=left, color=colour, edgecolor="white", label=name)
                left += value
            labels.append((y, f"{kind}, rank {rank}"))
            y += 1
        y += 0.6
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    axes.set(yticks=[place for place, _ in labels], yticklabels=[text for _, text in labels], xlabel="MB on this rank")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def mesh(places: Sequence[Sequence[int]], names: tuple[str, str] = ("replicate", "shard")) -> None:
    """Draw the ranks of a two-dimensional device mesh at their coordinates (row, column)."""
    rows, columns = (max(place[axis] for place in places) + 1 for axis in (0, 1))
    _, axes = canvas(2.2 * columns + 2.4, 1.1 * rows + 0.8)
    for rank, (row, column) in enumerate(places):
        box(axes, 2.4 * column, -1.1 * row, 2.1, 0.9, f"rank {rank}\nreplica {row}, piece {column}", RANK[rank])
    axes.text(1.2 * columns - 0.15, 1.15, f"{names[1]} →", ha="center", color=INK, fontsize=11)
    axes.text(
        -0.25,
        -1.1 * (rows - 1) / 2 + 0.45,
        f"← {names[0]}",
        ha="center",
        va="center",
        rotation=90,
        color=INK,
        fontsize=11,
    )
    axes.set(xlim=(-0.6, 2.4 * columns), ylim=(-1.1 * (rows - 1) - 0.1, 1.5), aspect="equal")
    axes.axis("off")
    plt.show()
