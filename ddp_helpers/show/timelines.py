"""How all-reduces overlap with backward, and what a step costs (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from .style import PHASE, canvas


def overlap(versions: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw one step of each version: a row for the arithmetic of each rank and one for its all-reduces.

    A record holds `arithmetic` (start, end) and `sent`, a list of (bytes, start, end), in seconds on one clock. The
    part of an all-reduce behind the end of the arithmetic is drawn dark.
    """
    figure, axes = canvas(8.5, 1.55 * len(versions) + 0.7, 1)
    y, ticks, labels = 0.0, [], []
    for name, records in versions.items():
        begin = min(record["arithmetic"][0] for record in records)
        for rank, record in enumerate(records):
            start, done = (1e3 * (time - begin) for time in record["arithmetic"])
            axes.barh(y, done - start, left=start, height=0.42, color=PHASE["backward"])
            for _, sent, end in record["sent"]:
                left, right = 1e3 * (sent - begin), 1e3 * (end - begin)
                axes.barh(y + 0.45, right - left, left=left, height=0.36, color="#F4C7A1", edgecolor="white")
                if right > done:
                    left = max(left, done)
                    axes.barh(y + 0.45, right - left, left=left, height=0.36, color=PHASE["communication"])
            ticks.append(y + 0.2)
            labels.append(f"{name}, rank {rank}")
            y += 1.05
        y += 0.35
    axes.set(yticks=ticks, yticklabels=labels, xlabel="milliseconds since the start of the step")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    names = ("forward and backward", "all-reduce, hidden", "all-reduce, exposed")
    colours = (PHASE["backward"], "#F4C7A1", PHASE["communication"])
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    figure.legend(handles, names, frameon=False, ncols=3, loc="outside upper center", fontsize=9)
    plt.show()


def step_bars(versions: Mapping[str, Sequence[float]]) -> None:
    """Draw the median step time of each version as a bar, with every single measurement as a dot; seconds."""
    _, axes = canvas(5, 2.6)
    for name, times in versions.items():
        values = sorted(1e3 * time for time in times)
        axes.bar(name, values[len(values) // 2], color="#BBBBBB", width=0.6)
        axes.plot([name] * len(values), values, "o", color="#222222", markersize=3)
    axes.set(ylabel="milliseconds per step", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
