"""Curves and bars of what was measured, and misread digits (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from .style import INK, PHASE, RANK, canvas


def loss_curves(curves: Mapping[str, Sequence[float]], smooth: int = 10) -> None:
    """Draw the loss of each run against its step, as the mean of `smooth` steps; later curves are dashed."""
    _, axes = canvas(7, 3.2)
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
    _, axes = canvas(7, 3.2)
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
    _, axes = canvas(7, 2.8)
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
    figure, axes = canvas(3 * world_size + 4, 3.0, world_size + 1)
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
