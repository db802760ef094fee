"""Pictures of where data and variables are (needs matplotlib; copy style.py with it)."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from .style import INK, PHASE, RANK, arrow, box, canvas


def data_flow(samples: int, world_size: int = 2, batch: int = 128) -> None:
    """Draw one training step: data set → shards → ranks → gradients → one model. `batch` is per rank."""
    _, axes = canvas(9, 0.9 + 1.1 * world_size)
    top = 1.2 * world_size
    middle = top / 2
    box(axes, 0, middle - 0.45, 1.5, 0.9, f"data set\n{samples:,} images", "#444444")
    box(axes, 8.1, middle - 0.45, 1.5, 0.9, f"all-reduce\nmean of {world_size}\ngradients", PHASE["communication"])
    for rank in range(world_size):
        y = top - 1.2 * rank - 1.05
        shard = -(-samples // world_size)
        box(axes, 2.1, y, 1.5, 0.9, f"shard {rank}\n{shard:,} images", RANK[rank])
        box(axes, 4.1, y, 1.5, 0.9, f"rank {rank}\n{batch} a step", RANK[rank])
        box(axes, 6.1, y, 1.5, 0.9, f"gradient {rank}\nof {batch} images", RANK[rank])
        arrow(axes, (1.5, middle), (2.1, y + 0.45))
        arrow(axes, (3.6, y + 0.45), (4.1, y + 0.45))
        arrow(axes, (5.6, y + 0.45), (6.1, y + 0.45))
        arrow(axes, (7.6, y + 0.45), (8.1, middle))
    box(axes, 10.1, middle - 0.45, 1.5, 0.9, "same step on\neach rank:\none model", "#444444")
    arrow(axes, (9.6, middle), (10.1, middle))
    axes.set(xlim=(-0.1, 11.7), ylim=(-0.1, top), aspect="equal")
    axes.axis("off")
    plt.show()


def namespaces(notebook: Mapping[str, object], ranks: Sequence[Mapping[str, object]]) -> None:
    """Draw where variables live: the notebook's on the left, each rank's on the right, in rank order."""

    def lines(title: str, variables: Mapping[str, object]) -> str:
        return "\n".join([title, *(f"{name} = {value}" for name, value in variables.items())])

    _, axes = canvas(8, 0.2 + 1.1 * len(ranks))
    top = 1.2 * len(ranks) - 0.2
    box(axes, 0, 0, 2.2, top, lines("the notebook", notebook), "#444444")
    for rank, variables in enumerate(ranks):
        y = top - 1.2 * rank - 1
        box(axes, 6.2, y, 2.2, 1, lines(f"rank {rank}", variables), RANK[rank])
        arrow(axes, (2.25, y + 0.62), (6.15, y + 0.62))
        arrow(axes, (6.15, y + 0.38), (2.25, y + 0.38))
        for height, name in ((0.8, "ranks.push(name=value)"), (0.18, 'ranks.pull("name")')):
            axes.text(4.2, y + height, name, ha="center", va="center", color=INK, fontsize=9, family="monospace")
    axes.set(xlim=(-0.1, 8.5), ylim=(-0.1, top + 0.1), aspect="equal")
    axes.axis("off")
    plt.show()
