"""Errors of evaluation recipes, confusion matrix, order of gathered rows (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from .style import INK, RANK, arrow, box, canvas

COLOURS = "#444444", "#D55E00"  # of no rank: what is drawn is a total of all of them


def recipe_errors(
    errors: Mapping[str, Mapping[str, float]], counted: Mapping[str, int], left: float = 1e-4, right: float = 50
) -> None:
    """Draw how far the accuracy of each recipe is from the truth, on a logarithmic axis from `left` to `right`.

    errors: series -> recipe -> error in percentage points; counted: recipe -> number of images that it counted. What is
    below 1e-9 is rounding and marked as exact.
    """
    names, high = list(counted), 0.8 / len(errors)
    _, axes = canvas(7.5, 0.62 * len(names) + 1.0)
    for i, (series, values) in enumerate(errors.items()):
        places = [k + (i - (len(errors) - 1) / 2) * high for k in range(len(names))]
        sizes = [abs(values[name]) for name in names]
        lengths = [max(0.0, size - left) for size in sizes]
        axes.barh(places, lengths, 0.9 * high, left=left, color=COLOURS[i], label=series)
        for place, size in zip(places, sizes, strict=True):
            text = " exact" if size < 1e-9 else f" {size:.1g}"
            axes.text(max(size, left), place, text, va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(names)), [f"{name}\n{counted[name]:,} counted" for name in names], fontsize=9)
    axes.set(xscale="log", xlim=(left, right), xlabel="error of the accuracy in percentage points")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    plt.show()


def confusion(matrix: Sequence[Sequence[int]], accuracies: Sequence[float]) -> None:
    """Draw a confusion matrix [classes, classes] with its counts, and beside it the accuracy of each class."""
    _, (counts, bars) = canvas(9, 4.2, 2)
    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    counts.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    for label, row in enumerate(matrix):
        for guess, count in enumerate(row):
            if count:
                ink = "white" if shares[label][guess] > 0.5 else INK
                counts.text(guess, label, count, ha="center", va="center", fontsize=8, color=ink)
    ticks = range(len(matrix))
    counts.set(xticks=ticks, yticks=ticks, xlabel="guess", ylabel="label", title="images, counted on all ranks")
    bars.barh(ticks, [100 * accuracy for accuracy in accuracies], color=COLOURS[0])
    for label, accuracy in enumerate(accuracies):
        bars.text(
            100 * accuracy - 1, label, f"{100 * accuracy:.0f}", ha="right", va="center", fontsize=8, color="white"
        )
    bars.set(yticks=ticks, xlim=(0, 100), xlabel="right guesses in percent", ylabel="label", title="each class")
    bars.invert_yaxis()
    bars.spines[["top", "right"]].set_visible(False)
    for axes in (counts, bars):
        axes.title.set_fontsize(10)
    plt.show()


def dealt(shards: Sequence[Sequence[int]]) -> None:
    """Draw each rank's rows by the index of their sample, padded, then put one after the other, then dealt in turn."""
    longest = max(map(len, shards))
    _, axes = canvas(7.5, 0.42 * len(shards) + 1.7)

    def row(y: float, name: str, rows: Sequence[tuple[int, int | None]]) -> None:
        axes.text(-0.3, y + 0.35, name, ha="right", va="center", color=INK, fontsize=10)
        for x, (rank, index) in enumerate(rows):
            text, colour = ("pad", "#DDDDDD") if index is None else (str(index), RANK[rank])
            box(axes, x, y, 0.9, 0.7, text, colour)

    padded = [[(r, i) for i in [*shard, *[None] * (longest - len(shard))]] for r, shard in enumerate(shards)]
    for rank, rows in enumerate(padded):
        row(-rank * 0.85, f"rank {rank}", rows)
    below = -0.85 * len(shards) - 0.6
    row(below, "one after the other", [cell for rows in padded for cell in rows if cell[1] is not None])
    row(below - 1.05, "dealt in turn", [cell for turn in zip(*padded, strict=True) for cell in turn])
    axes.text(longest + 0.6, below + 1.9, "gather", va="center", color=INK, fontsize=10)
    arrow(axes, (longest + 0.3, below + 2.4), (longest + 0.3, below + 1.0))
    axes.set(xlim=(-3.4, longest * len(shards) + 0.1), ylim=(below - 1.2, 0.8))
    axes.axis("off")
    plt.show()
