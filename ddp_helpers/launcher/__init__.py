"""Launch ranks from a notebook, a script or a test (needs cloudpickle; copy this folder)."""

from .launch import launch
from .live import Ranks, load_ipython_extension
from .rank import progress
from .report import HangError, RankError
from .travel import TravelError

__all__ = ["HangError", "RankError", "Ranks", "TravelError", "launch", "load_ipython_extension", "progress"]
