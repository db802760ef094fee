"""Colours and shapes that every figure uses (needs matplotlib)."""

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
    "waiting": "#F0C000",
    "optimizer": "#CC79A7",
    "data": "#999999",
}


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none"))
    ink = INK if sum(int(colour[i : i + 2], 16) * w for i, w in ((1, 0.3), (3, 0.6), (5, 0.1))) > 140 else "white"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=10)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, linewidth=1.4))
