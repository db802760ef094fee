"""Pictures of ranks and of tensors that move between them (needs matplotlib; copy style.py with it)."""

import matplotlib.pyplot as plt

from .style import INK, RANK, box, canvas


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
            axes.add_patch(plt.Rectangle((x, top - height), 1.8, height, facecolor="#EEEEEE", edgecolor="#BBBBBB"))
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
