"""Helpers of the DDP notebooks: run code on real ranks, and teach what they do."""

from .launcher import HangError, RankError, Ranks, TravelError, launch, load_ipython_extension, progress

__all__ = ["HangError", "RankError", "Ranks", "TravelError", "launch", "load_ipython_extension", "progress"]
