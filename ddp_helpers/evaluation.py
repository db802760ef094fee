"""Exact metrics of a data set split over the ranks: needs torch, and process_group.py and data.py beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .data import shard
from .process_group import collective_device, is_initialized, rank, unwrap, world_size


class Evaluation(NamedTuple):
    """What `evaluate` returns, the same on every rank; loss and accuracy of no samples are nan."""

    loss: float  # mean negative log-likelihood per sample
    accuracy: float  # correct / count, 0 to 1
    correct: int
    count: int  # type: ignore[assignment]  # tuple has a method of that name


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    batch_size: int = 1000,
    device: torch.device | str = "cpu",
    *,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Evaluation:
    """Evaluate a classifier on the whole data set, each sample once; all ranks must call it, with the same data set.

    `model` maps inputs [b, ...] to log-probabilities [b, classes], `dataset` serves (input, label). Each rank takes the
    unpadded shard rank, rank + world size, ...; sums travel as float64 and int64. A DDP model is evaluated without its
    wrapper, with rank 0's buffers where the wrapper keeps them equal. Modes (train, eval) are left as they were.
    `collate_fn` defaults to the data set's own `collate`, else torch's.
    """
    if is_initialized() and getattr(model, "broadcast_buffers", False):
        for buffer in model.buffers():  # as the wrapper would before its next forward pass, once instead of per batch
            dist.broadcast(buffer, src=0)
    module = unwrap(model)
    modes = [(m, m.training) for m in module.modules()]
    indices = shard(len(dataset), rank(), world_size())  # type: ignore[arg-type]
    collate = collate_fn or getattr(dataset, "collate", None)
    own = torch.Generator()  # a loader draws a seed: not from the generator that training uses
    loader = DataLoader(dataset, batch_size, sampler=indices, collate_fn=collate, generator=own)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    module.eval()
    try:
        with torch.no_grad():
            for inputs, labels in loader:
                output, labels = module(inputs.to(device)), labels.to(device)
                loss += F.nll_loss(output, labels, reduction="none").sum(dtype=torch.float64)
                correct += (output.argmax(1) == labels).sum()
    finally:
        for m, training in modes:
            m.training = training
    totals = torch.stack([correct, torch.full_like(correct, len(indices))]).to(collective_device())
    loss = loss.to(collective_device())
    if is_initialized():
        dist.all_reduce(loss)
        dist.all_reduce(totals)
    right, count = totals.tolist()
    if not count:
        return Evaluation(float("nan"), float("nan"), 0, 0)
    return Evaluation(loss.item() / count, right / count, right, count)
