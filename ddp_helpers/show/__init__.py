"""The notebooks' figures (need matplotlib); the only part of the package that imports it.

Every figure has an opaque white ground, so that it reads alike in light and dark themes, and draws rank r in
the same colour everywhere.
"""

from .charts import digits, drift, load, loss_by_epoch, loss_curves
from .clinic import sequences
from .collectives import collective, collectives, cost_fit, rank_map
from .diagrams import data_flow, namespaces
from .memory import memory, mesh
from .metrics import confusion, dealt, recipe_errors
from .resume import resumed
from .sampling import sampler_grid
from .tables import SideBySide
from .timelines import overlap, step_bars
from .wrapper import buckets, gap

__all__ = [
    "SideBySide",
    "buckets",
    "collective",
    "collectives",
    "confusion",
    "cost_fit",
    "data_flow",
    "dealt",
    "digits",
    "drift",
    "gap",
    "load",
    "loss_by_epoch",
    "loss_curves",
    "memory",
    "mesh",
    "namespaces",
    "overlap",
    "rank_map",
    "recipe_errors",
    "resumed",
    "sampler_grid",
    "sequences",
    "step_bars",
]
