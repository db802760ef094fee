"""The notebooks' figures (needs matplotlib); the only module of the package that imports it.

Every figure has an opaque white ground, so that it reads alike in light and dark themes, and draws rank r in
the same colour everywhere.
"""

import difflib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

RANK = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]  # colour-blind safe
INK, PALE = "#222222", "#EEEEEE"
PHASE = {
    "forward": "#009E73",
    "backward": "#56B4E9",
    "communication": "#D55E00",
    "optimizer": "#CC79A7",
    "data": "#999999",
}


def _canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none"))
    ink = INK if sum(int(colour[i : i + 2], 16) * w for i, w in ((1, 0.3), (3, 0.6), (5, 0.1))) > 140 else "white"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=10)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, linewidth=1.4))


def data_flow(samples: int, world_size: int = 2, batch: int = 128) -> None:
    """Draw one training step: data set → shards → ranks → gradients → one model. `batch` is per rank."""
    _, axes = _canvas(9, 0.9 + 1.1 * world_size)
    top = 1.2 * world_size
    middle = top / 2
    _box(axes, 0, middle - 0.45, 1.5, 0.9, f"data set\n{samples:,} images", "#444444")
    _box(axes, 8.1, middle - 0.45, 1.5, 0.9, f"all-reduce\nmean of {world_size}\ngradients", PHASE["communication"])
    for rank in range(world_size):
        y = top - 1.2 * rank - 1.05
        shard = -(-samples // world_size)
        _box(axes, 2.1, y, 1.5, 0.9, f"shard {rank}\n{shard:,} images", RANK[rank])
        _box(axes, 4.1, y, 1.5, 0.9, f"rank {rank}\n{batch} a step", RANK[rank])
        _box(axes, 6.1, y, 1.5, 0.9, f"gradient {rank}\nof {batch} images", RANK[rank])
        _arrow(axes, (1.5, middle), (2.1, y + 0.45))
        _arrow(axes, (3.6, y + 0.45), (4.1, y + 0.45))
        _arrow(axes, (5.6, y + 0.45), (6.1, y + 0.45))
        _arrow(axes, (7.6, y + 0.45), (8.1, middle))
    _box(axes, 10.1, middle - 0.45, 1.5, 0.9, "same step on\neach rank:\none model", "#444444")
    _arrow(axes, (9.6, middle), (10.1, middle))
    axes.set(xlim=(-0.1, 11.7), ylim=(-0.1, top), aspect="equal")
    axes.axis("off")
    plt.show()


def namespaces(notebook: Mapping[str, object], ranks: Sequence[Mapping[str, object]]) -> None:
    """Draw where variables live: the notebook's on the left, each rank's on the right, in rank order."""

    def lines(title: str, variables: Mapping[str, object]) -> str:
        return "\n".join([title, *(f"{name} = {value}" for name, value in variables.items())])

    _, axes = _canvas(8, 0.2 + 1.1 * len(ranks))
    top = 1.2 * len(ranks) - 0.2
    _box(axes, 0, 0, 2.2, top, lines("the notebook", notebook), "#444444")
    for rank, variables in enumerate(ranks):
        y = top - 1.2 * rank - 1
        _box(axes, 6.2, y, 2.2, 1, lines(f"rank {rank}", variables), RANK[rank])
        _arrow(axes, (2.25, y + 0.62), (6.15, y + 0.62))
        _arrow(axes, (6.15, y + 0.38), (2.25, y + 0.38))
        for height, name in ((0.8, "ranks.push(name=value)"), (0.18, 'ranks.pull("name")')):
            axes.text(4.2, y + height, name, ha="center", va="center", color=INK, fontsize=9, family="monospace")
    axes.set(xlim=(-0.1, 8.5), ylim=(-0.1, top + 0.1), aspect="equal")
    axes.axis("off")
    plt.show()


def loss_curves(curves: Mapping[str, Sequence[float]], smooth: int = 10) -> None:
    """Draw the loss of each run against its step, as the mean of `smooth` steps; later curves are dashed."""
    _, axes = _canvas(7, 3.2)
    for i, (name, losses) in enumerate(curves.items()):
        means = [sum(losses[k : k + smooth]) / len(losses[k : k + smooth]) for k in range(0, len(losses), smooth)]
        steps = [k + smooth / 2 for k in range(0, len(losses), smooth)]
        colour, width, dash = [("#444444", 5, "-"), (RANK[1], 1.8, "--"), (RANK[2], 1.8, ":")][min(i, 2)]
        axes.plot(steps, means, dash, color=colour, linewidth=width, label=name, alpha=0.5 if i == 0 else 1)
    axes.set(xlabel="optimizer step", ylabel=f"training loss (mean of {smooth} steps)", yscale="log")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def loss_by_epoch(curves: Mapping[str, Sequence[float]], epochs: int = 10) -> None:
    """Draw the mean loss of each epoch, for runs with unequal numbers of steps per epoch."""
    _, axes = _canvas(7, 3.2)
    for i, (name, losses) in enumerate(curves.items()):
        size = len(losses) // epochs
        means = [sum(losses[k * size : (k + 1) * size]) / size for k in range(epochs)]
        style = {"color": "#444444", "linewidth": 4, "alpha": 0.5} if i == 0 else {"color": RANK[i], "linewidth": 1.8}
        axes.plot(range(1, epochs + 1), means, marker="o^sD"[i % 4], markersize=4, label=name, **style)
    axes.set(xlabel="epoch", ylabel="mean training loss", yscale="log", xticks=range(1, epochs + 1))
    axes.legend(frameon=False, title="global batch, learning rate → accuracy", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def drift(gaps: Mapping[str, Sequence[float]]) -> None:
    """Draw the largest difference of any weight between two runs, after each epoch, on a logarithmic axis."""
    _, axes = _canvas(7, 2.8)
    for i, (name, values) in enumerate(gaps.items()):
        axes.plot(range(1, len(values) + 1), values, "o-", color=[RANK[5], RANK[0], RANK[2]][i], label=name)
    longest = max(map(len, gaps.values()))
    axes.set(xlabel="epoch", ylabel="largest difference", yscale="log", xticks=range(1, longest + 1))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def load(phases: Sequence[Mapping[str, float]], title: str = "") -> None:
    """Draw what each rank spent its step on: a pie for each rank, and all ranks as bars. Values in milliseconds."""
    world_size = len(phases)
    figure, axes = _canvas(3 * world_size + 4, 3.0, world_size + 1)
    for rank, times in enumerate(phases):
        axes[rank].pie(
            list(times.values()),
            colors=[PHASE[name] for name in times],
            startangle=90,
            counterclock=False,
            wedgeprops={"edgecolor": "white", "linewidth": 1},
        )
        axes[rank].set_title(f"rank {rank}", color=RANK[rank], fontweight="bold")
    left = [0.0] * world_size
    for name in phases[0]:
        values = [times[name] for times in phases]
        axes[-1].barh(range(world_size), values, left=left, color=PHASE[name], edgecolor="white", label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes[-1].set(
        yticks=range(world_size), yticklabels=[f"rank {r}" for r in range(world_size)], xlabel="milliseconds per step"
    )
    axes[-1].invert_yaxis()
    axes[-1].spines[["top", "right"]].set_visible(False)
    axes[-1].legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)
    if title:
        figure.suptitle(title, fontsize=11)
    plt.show()


def digits(images: Any, labels: Sequence[int], guesses: Sequence[int], columns: int = 10) -> None:
    """Draw images [n, 28, 28] with the true label and the model's guess under each."""
    rows = -(-len(images) // columns)
    _, axes = plt.subplots(
        rows,
        columns,
        figsize=(0.85 * columns, 1.15 * rows),
        dpi=100,
        squeeze=False,
        facecolor="white",
        layout="constrained",
    )
    for k, cell in enumerate(axes.flat):
        cell.axis("off")
        if k < len(images):
            cell.imshow(images[k], cmap="gray_r")
            cell.set_title(f"{labels[k]} → {guesses[k]}", fontsize=9, color=INK, y=-0.32)
    plt.show()


class SideBySide:
    """Two source files next to each other, changed lines marked; shown as a table in a notebook."""

    def __init__(self, left: str | Path, right: str | Path) -> None:
        self.names = Path(left).name, Path(right).name
        a, b = (Path(file).read_text().splitlines() for file in (left, right))
        self.rows: list[tuple[str, str, bool]] = []
        for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            for n in range(max(j - i, m - k)):
                self.rows.append((a[i + n] if i + n < j else "", b[k + n] if k + n < m else "", tag != "equal"))
        self.changed = sum(bool(right) for _, right, changed in self.rows if changed)

    def _repr_html_(self) -> str:
        def cell(text: str, colour: str) -> str:
            style = (
                f"text-align:left;white-space:pre;font-family:monospace;color:#222;background:{colour};padding:0 8px"
            )
            return f'<td style="{style}">{html.escape(text) or "&nbsp;"}</td>'

        head = "".join(f'<th style="text-align:left">{name}</th>' for name in self.names)
        old, new, same = "#ffe3cf", "#d5f0e3", "#fff"
        body = "".join(
            f"<tr>{cell(a, old if changed and a else same)}{cell(b, new if changed and b else same)}</tr>"
            for a, b, changed in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"

    def __repr__(self) -> str:
        return f"{self.names[0]} and {self.names[1]}: {self.changed} new or changed lines"
