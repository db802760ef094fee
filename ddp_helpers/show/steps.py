"""Steps of real runs, and what more ranks would cost (needs matplotlib; copy style.py and timeline.py with it)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from ..timeline import phases
from .style import INK, PHASE, RANK, canvas

HIDDEN = "#F4C7A1"


def gantt(ranks: Sequence[Sequence[Any]], step: int | None = None) -> int:
    """Draw one step of all ranks' spans, by default the quickest after step 0, and return its number.

    A rank has a row for its phases and, below, a thin one for each bucket. What backward does not hide of an
    all-reduce is drawn dark: waiting until the last rank has sent its last bucket, communication from then on.
    """
    if step is None:
        begin_end = {s.step: [t.start for t in ranks[0] if t.step == s.step] for s in ranks[0] if s.step > 0}
        lengths = {
            k: max(t.end for spans in ranks for t in spans if t.step == k) - min(begin_end[k]) for k in begin_end
        }
        step = min(lengths, key=lambda k: lengths[k])
    chosen = [[span for span in spans if span.step == step] for spans in ranks]
    begin = min(span.start for spans in chosen for span in spans)
    last_sent = max((s.start for spans in chosen for s in spans if s.name == "bucket"), default=begin)
    figure, axes = canvas(8.5, 1.1 * len(ranks) + 1.1)
    shown: dict[str, str] = {}  # what the legend explains -> colour

    def bar(y: float, left: float, right: float, height: float, name: str, colour: str) -> None:
        if right > left:
            shown[name] = colour
            axes.barh(y, 1e3 * (right - left), left=1e3 * (left - begin), height=height, color=colour)

    for rank, spans in enumerate(chosen):
        done = max((span.end for span in spans if span.name == "backward"), default=begin)
        count = sum(span.name == "bucket" for span in spans)
        for span in spans:
            if span.name != "bucket":
                bar(2 * rank, span.start, span.end, 0.6, span.name, PHASE[span.name])
                continue
            y, height = 2 * rank + 0.4 + (span.bucket + 0.5) / max(1, count), 0.8 / max(1, count)
            bar(y, span.start, min(span.end, done), height, "all-reduce, hidden", HIDDEN)
            exposed = max(span.start, done)
            bar(y, exposed, min(span.end, last_sent), height, "exposed: waiting", PHASE["waiting"])
            late = max(exposed, last_sent)
            bar(y, late, span.end, height, "exposed: communication", PHASE["communication"])
    ticks = [2 * rank + row for rank in range(len(ranks)) for row in (0, 0.9)]
    axes.set(yticks=ticks, yticklabels=[f"rank {r}{row}" for r in range(len(ranks)) for row in ("", ", buckets")])
    for k, label in enumerate(axes.get_yticklabels()):
        label.set_color(RANK[k // 2])
    axes.set_xlabel(f"milliseconds since the start of step {step}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
    figure.legend(handles, shown, frameon=False, ncols=4, loc="outside upper center", fontsize=9)
    plt.show()
    return step


def bucket_sweep(caps: Sequence[float | None], counts: Sequence[int], spans: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Draw the mean step, and the exposed part of it, against the cap in MB; spans are [cap][rank]."""
    _, axes = canvas(7, 3.0)
    steps, exposed = [], []
    for of_ranks in spans:
        later = [[span for span in of_rank if span.step > 2] for of_rank in of_ranks]
        count = len({span.step for span in later[0]})
        ends = [
            max(s.end for s in later[0] if s.step == k) - min(s.start for s in later[0] if s.step == k)
            for k in sorted({span.step for span in later[0]})
        ]
        steps.append(1e3 * float(np.median(ends)))
        scale = (max(span.step for span in later[0]) + 1) / count  # phases() divides by all steps
        times = phases(later)
        exposed.append(scale * sum(t["communication"] + t["waiting"] for t in times) / len(times))
    places = range(len(caps))
    axes.plot(places, steps, "o-", color=INK, label="a step (median)")
    axes.plot(places, exposed, "s--", color=PHASE["communication"], label="exposed part (mean)")
    axes.set(
        xticks=places,
        xticklabels=[
            f"{f'{cap:g} MB' if cap else 'default'}\n{n} bucket{'s' * (n > 1)}"
            for cap, n in zip(caps, counts, strict=True)
        ],
    )
    axes.set(xlabel="bucket_cap_mb", ylabel="milliseconds", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def trade(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw accuracy against the bytes of a step; a result has `sent` (bytes of each all-reduce), accuracy, seconds."""
    _, axes = canvas(7, 3.0)
    for i, (name, result) in enumerate(results.items()):
        x, y = sum(result["sent"]), result["accuracy"]
        axes.plot(
            x,
            y,
            "os^D"[i % 4],
            color=RANK[[0, 2, 3, 5][i % 4]],
            markersize=13 if i == 2 else 9,
            fillstyle="none" if i == 2 else "full",
            label=f"{name}: {1e3 * result['seconds']:.1f} ms a step",
        )
    axes.set(xscale="log", xlabel="bytes that a rank puts into all-reduces in a step", ylabel="accuracy")
    middle = sum(result["accuracy"] for result in results.values()) / len(results)
    axes.set_ylim(middle - 0.05, middle + 0.05)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def speedups(groups: Mapping[str, tuple[float, float]]) -> None:
    """Draw the throughput of two ranks relative to one: a bar for what was measured, a diamond for the prediction."""
    _, axes = canvas(7, 2.8)
    names = list(groups)
    axes.bar(names, [measured for measured, _ in groups.values()], width=0.55, color="#BBBBBB", label="measured")
    axes.plot(names, [predicted for _, predicted in groups.values()], "D", color=RANK[5], label="predicted")
    axes.axhline(1, color=INK, linewidth=1)
    axes.axhline(2, color=INK, linewidth=1, linestyle=":")
    axes.text(len(names) - 0.6, 2.03, "ideal", fontsize=9, color=INK)
    axes.set(ylabel="images per second,\nrelative to one rank", ylim=(0, 2.3))
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def second_rank(points: Sequence[tuple[int, int, float, float]], alpha: float, beta: float) -> tuple[float, float]:
    """Draw the speed-up of a second rank against the weights; points are (weights, images, seconds on 1, on 2).

    Fits seconds = fixed + c · weights · images to the steps on one rank, each weighted by its own size, draws what
    follows for two ranks with α + 4β · weights, and returns (fixed, c).
    """
    work = np.array([weights * images for weights, images, *_ in points], dtype=float)
    alone = np.array([one for _, _, one, _ in points])
    fixed, c = np.linalg.lstsq(np.stack([1 / alone, work / alone], axis=1), np.ones(len(alone)), rcond=None)[0]
    _, axes = canvas(7, 3.2)
    weights = np.geomspace(min(p[0] for p in points) / 2, 2 * max(p[0] for p in points), 100)
    for k, images in enumerate(sorted({images for _, images, *_ in points})):
        one = fixed + c * weights * images
        two = fixed + c * weights * images / 2 + alpha + 4 * beta * weights
        colour = RANK[[5, 0, 2][k % 3]]
        axes.plot(weights, one / two, color=colour, label=f"global batch {images}, calculated")
        chosen = [point for point in points if point[1] == images]
        ratios = [on_one / on_two for _, _, on_one, on_two in chosen]
        axes.plot([p[0] for p in chosen], ratios, "o", color=colour, label=f"global batch {images}, measured")
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(
        xscale="log",
        xlabel="weights of the model",
        ylabel="speed-up by a second rank\n(above 1: two are faster)",
        ylim=(0, 2.1),
    )
    axes.legend(frameon=False, ncols=2, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
    return float(fixed), float(c)


ASSUMED = """a calculation from this machine's α and β; it assumes
• every rank has cores of its own, as fast as these
• every link is as fast as this machine's loopback
• a ring: n − 1 times α, 2(n − 1)/n times the bytes
• no rank is ever late"""


def extrapolation(
    models: Mapping[str, tuple[float, int]], ranks: Sequence[int], reduce_seconds: Callable[[int, int], float]
) -> dict[str, list[float]]:
    """Draw the calculated efficiency of weak scaling; models are name -> (seconds of a step on one rank, bytes).

    A band lies between an all-reduce of which nothing is hidden and one of which two thirds of a step hide as much as
    they can. Returns the lower edges. `reduce_seconds(n, bytes)` is the model of the all-reduce.
    """
    _, axes = canvas(7.5, 3.8)
    lower: dict[str, list[float]] = {}
    for k, (name, (step, size)) in enumerate(models.items()):
        reduce = [reduce_seconds(n, size) for n in ranks]
        lower[name] = [step / (step + t) for t in reduce]
        upper = [step / (step + max(0.0, t - 2 * step / 3)) for t in reduce]
        colour = RANK[[5, 0, 2][k % 3]]
        axes.fill_between(ranks, lower[name], upper, color=colour, alpha=0.25, linewidth=0)
        axes.plot(ranks, lower[name], color=colour, label=f"{name}, {size:,} bytes: nothing is hidden")
    axes.text(0.53, 0.98, ASSUMED, transform=axes.transAxes, ha="left", va="top", fontsize=8.5, color=INK)
    axes.set(xscale="log", ylim=(0, 1.5), xlabel="ranks", ylabel="efficiency", yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
    return lower
