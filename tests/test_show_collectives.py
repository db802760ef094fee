"""The pictures of ranks and collectives say what they drew, and the cost model finds the numbers behind its points."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex

from ddp_helpers import show
from ddp_helpers.show.collectives import MIXED
from ddp_helpers.show.style import PALE, RANK

MINE = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]


@pytest.fixture(autouse=True)
def figures() -> None:
    """Draw without a screen, and forget the figures of the test before."""
    matplotlib.use("Agg")
    plt.close("all")


def boxes() -> list[str]:
    """Return the colours of the boxes in the first axes of the newest figure."""
    return [to_hex(patch.get_facecolor()).upper() for patch in plt.gcf().axes[0].patches]


def texts() -> list[str]:
    """Return the texts in all axes of the newest figure."""
    return [text.get_text() for axes in plt.gcf().axes for text in axes.texts if text.get_text()]


def test_rank_map_counts_over_nodes() -> None:
    assert show.rank_map((1, 2), (2, 3)) == [
        *[(0, 0, 0), (1, 0, 1)],
        *[(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2)],
    ]
    assert "2 nodes × 3 ranks = world size 6" in texts()


def test_unchanged_values_count_as_unchanged() -> None:
    assert show.collective(MINE, MINE, "nothing") == 0
    assert show.collective(MINE, [MINE[1], MINE[1]], "broadcast") == 2
    assert show.collective(MINE, [[MINE[0], MINE[1]], None], "gather") == 2
    assert "nothing" in texts()


def test_a_value_has_the_colour_of_the_rank_that_had_it() -> None:
    show.collective([MINE[0][:1], MINE[1][:1]], [[10.0], [11.0]], "one moved, one added")
    assert boxes()[:4] == [RANK[0], RANK[1], RANK[1], MIXED]
    show.collective([[1.0], [1.0]], [[1.0], [1.0]], "the same on both: each its own")
    assert boxes()[:4] == [RANK[0], RANK[0], RANK[1], RANK[1]]
    show.collective([[0.0], [0.0]], [[0.0], [0.0]], "zeros")
    assert set(boxes()[:4]) == {PALE}


def test_grid_draws_each_operation() -> None:
    total = [MINE[0] + MINE[1]] * 2
    assert show.collectives({"sum": (MINE, total), "same": (MINE, MINE), "last": (MINE, total)}) == {
        "sum": 4,
        "same": 0,
        "last": 4,
    }
    assert len(plt.gcf().axes) == 4


@pytest.mark.parametrize(("alpha", "beta"), [(2e-4, 1e-9), (5e-3, 4e-9)])
def test_cost_fit_finds_both_prices(alpha: float, beta: float) -> None:
    sizes = [4**k for k in range(1, 13)]
    found = show.cost_fit(sizes, [alpha + beta * size for size in sizes], "exact")
    assert found == pytest.approx((alpha, beta), rel=1e-6)
