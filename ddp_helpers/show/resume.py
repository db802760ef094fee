"""A run that was killed and resumed, over one that was not (needs matplotlib; copy style.py with it)."""

from collections.abc import Sequence

import matplotlib.pyplot as plt

from .style import INK, RANK, canvas


def resumed(undisturbed: Sequence[float], again: Sequence[float], saved: int, killed: int, smooth: int = 5) -> None:
    """Draw two loss curves over each other, as means of `smooth` steps: the second was resumed at step `saved`.

    The steps from `saved` to `killed`, which were lost and made again, are shaded.
    """
    _, axes = canvas(7, 3.2)

    def means(losses: Sequence[float]) -> list[float]:
        return [sum(losses[max(0, k + 1 - smooth) : k + 1]) / min(smooth, k + 1) for k in range(len(losses))]

    steps, curve = range(1, len(again) + 1), means(again)
    axes.axvspan(saved, killed, color="#F3D9CC", label=f"steps {saved + 1} to {killed}: lost, made again")
    axes.plot(range(1, len(undisturbed) + 1), means(undisturbed), color="#BBBBBB", linewidth=7, label="undisturbed")
    axes.plot(steps[:saved], curve[:saved], color=RANK[0], linewidth=2, label="until the last checkpoint")
    axes.plot(steps[saved - 1 :], curve[saved - 1 :], "--", color=RANK[2], linewidth=2, label="resumed")
    axes.plot([killed], [curve[killed - 1]], "X", color=RANK[5], markersize=11, label="a rank is killed", zorder=5)
    axes.set(xlabel="optimizer step", ylabel=f"training loss (mean of {smooth} steps)")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
