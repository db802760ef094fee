"""Pictures of ranks, and of tensors that move between them (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from .style import INK, PALE, RANK, arrow, box, canvas

MIXED = "#444444"  # a value that no rank had before


def rank_map(*clusters: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Draw the ranks of each (nodes, ranks per node) side by side; return (rank, node, local rank) of all of them."""
    rows = max(per_node for _, per_node in clusters)
    width = 2.0 * sum(nodes for nodes, _ in clusters) + 0.7 * (len(clusters) - 1)
    _, axes = canvas(1.15 * width, 0.85 + 0.95 * rows)
    drawn = []
    x, top = 0.0, 1.0 * rows + 0.5
    for nodes, per_node in clusters:
        title = f"{nodes} node{'s' * (nodes > 1)} × {per_node} ranks = world size {nodes * per_node}"
        axes.text(x + nodes - 0.1, top + 0.15, title, ha="center", va="bottom", color=INK, fontsize=10)
        for node in range(nodes):
            height = per_node + 0.45
            axes.add_patch(plt.Rectangle((x, top - height), 1.8, height, facecolor=PALE, edgecolor="#BBBBBB"))
            axes.text(x + 0.9, top - 0.08, f"node {node}", ha="center", va="top", color=INK, fontsize=10)
            for local_rank in range(per_node):
                rank = node * per_node + local_rank
                text = f"rank {rank}\nlocal rank {local_rank}"
                box(axes, x + 0.15, top - 1.25 - local_rank, 1.5, 0.85, text, RANK[rank])
                drawn.append((rank, node, local_rank))
            x += 2.0
        x += 0.7
    axes.set(xlim=(-0.05, x - 0.85), ylim=(top - rows - 0.5, top + 0.55), aspect="equal")
    axes.axis("off")
    plt.show()
    return drawn


def collective(before: Sequence[Any], after: Sequence[Any], title: str, axes: Axes | None = None) -> int:
    """Draw each rank's values before and after an operation, one rank a row; return how many cells it has changed.

    A rank's value is a tensor, a list of tensors or numbers, or None for nothing. A cell has the colour of the rank
    that had its value before, dark grey for a value that nobody had, pale grey for 0. Without `axes` it is a figure
    of its own.
    """
    rows = [[_numbers(values) for values in ranks] for ranks in (before, after)]
    wide = max(len(values) for ranks in rows for values in ranks)
    alone = axes is None
    if axes is None:
        _, axes = canvas(1.4 + 1.1 * wide, 0.6 + 0.42 * len(before))
    shift, changed = wide + 1.1, 0
    for rank, (old, new) in enumerate(zip(*rows, strict=True)):
        y = -0.85 * rank
        axes.text(-0.15, y + 0.35, f"rank {rank}", ha="right", va="center", color=INK, fontsize=9)
        for x, values in ((0.0, old), (shift, new)):
            for i, value in enumerate(values):
                ours = value in old
                owner = rank if ours else next((r for r, theirs in enumerate(rows[0]) if value in theirs), None)
                colour = PALE if value == 0 else MIXED if owner is None else RANK[owner]
                box(axes, x + i + 0.04, y, 0.92, 0.7, "", colour)
                ink = "white" if colour in (MIXED, RANK[0]) else INK
                axes.text(x + i + 0.5, y + 0.34, f"{value:g}", ha="center", va="center", color=ink, fontsize=9)
            if not values:
                axes.text(x + wide / 2, y + 0.35, "nothing", ha="center", va="center", color="#777777", fontsize=8)
        changed += sum(i >= len(old) or value != old[i] for i, value in enumerate(new))
    middle = -0.85 * (len(before) - 1) / 2 + 0.35
    arrow(axes, (wide + 0.15, middle), (shift - 0.15, middle))
    axes.set_title(title, fontsize=10, color=INK)
    axes.set(xlim=(-1.3, shift + wide + 0.05), ylim=(-0.85 * (len(before) - 1) - 0.08, 0.8), aspect="equal")
    axes.axis("off")
    if alone:
        plt.show()
    return changed


def collectives(pictures: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], columns: int = 2) -> dict[str, int]:
    """Draw `collective` for each title: (before, after), in a grid; return the number of changed cells by title."""
    lines = -(-len(pictures) // columns)
    ranks = len(next(iter(pictures.values()))[0])
    size = (4.3 * columns, lines * (0.45 + 0.42 * ranks))
    _, grid = plt.subplots(
        lines, columns, figsize=size, dpi=100, squeeze=False, facecolor="white", layout="constrained"
    )
    for axes in grid.flat:
        axes.axis("off")
    changed = {
        title: collective(before, after, title, axes)
        for axes, (title, (before, after)) in zip(grid.flat, pictures.items(), strict=False)
    }
    plt.show()
    return changed


def _numbers(values: Any) -> list[float]:
    """Return a rank's values as a flat list."""
    if values is None:
        return []
    return [float(x) for value in values for x in np.asarray(value).reshape(-1)]


def cost_fit(sizes: Sequence[int], seconds: Sequence[float], title: str = "") -> tuple[float, float]:
    """Fit seconds = α + β · bytes, each point weighted by its own size, draw both; return α (s) and β (s per byte)."""
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    alpha, beta = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None)[0]
    _, axes = canvas(7, 3.2)
    line = np.geomspace(n.min(), n.max(), 100)
    axes.plot(line, 1e3 * (alpha + beta * line), color=INK, linewidth=1.4, label="fitted: α + β · bytes")
    axes.plot(n, 1e3 * t, "o", color=RANK[5], label="measured")
    axes.axhline(1e3 * alpha, color="#777777", linestyle=":", linewidth=1.2)
    label = f"α = {1e3 * alpha:.2f} ms: the price of a call"
    axes.text(n.max(), 880 * alpha, label, ha="right", va="top", color="#555555", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor in bytes", ylabel="milliseconds")
    axes.set_ylim(bottom=500 * min(alpha, t.min()))
    axes.set_title(f"{title}  (1 / β = {1e-6 / beta:,.0f} MB/s)", fontsize=10, color=INK)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
    return float(alpha), float(beta)
