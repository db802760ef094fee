"""The notebooks' figures (need matplotlib); the only part of the package that imports it.

Every figure has an opaque white ground, so that it reads alike in light and dark themes, and draws rank r in
the same colour everywhere.
"""

from .charts import digits, drift, load, loss_by_epoch, loss_curves
from .clinic import sequences
from .collectives import rank_map
from .diagrams import data_flow, namespaces
from .tables import SideBySide

__all__ = [
    "SideBySide",
    "data_flow",
    "digits",
    "drift",
    "load",
    "loss_by_epoch",
    "loss_curves",
    "namespaces",
    "rank_map",
    "sequences",
]
