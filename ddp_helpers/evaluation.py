"""Exact metrics of a data set split over the ranks: needs torch, and process_group.py and data.py beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .data import shard
from .process_group import any_rank, collective_device, is_initialized, rank, unwrap, world_size


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


def reduce_sums(values: Mapping[str, float | Tensor]) -> dict[str, int | float]:
    """Add up named numbers over the ranks, by name; all ranks must call it, each in any order of the names.

    Integers stay integers, everything else is summed in float64, in rank order: one dictionary, the same on every rank.
    Values are numbers or tensors of one element. Raises ValueError on every rank when one of them has other names
    than rank 0 or a value that is no number.
    """
    mine: dict[str, int | float] = {}
    fault = ""
    for name, value in values.items():
        try:
            number = value.item() if isinstance(value, Tensor) else value
            mine[name] = number.__index__() if hasattr(number, "__index__") else float(number)
        except Exception as error:  # a rank that raised here would leave the others waiting
            fault = fault or f"has no number under {name!r}: {type(error).__name__}: {error}"
    everyone = _gather((fault, mine))
    _raise_first([fault for fault, _ in everyone])
    everyone = [numbers for _, numbers in everyone]
    _raise_first([_other_names(numbers, everyone[0]) for numbers in everyone])
    return {name: sum(numbers[name] for numbers in everyone) for name in everyone[0]}


def confusion_matrix(guesses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Count how often each label met each guess, over all ranks; all ranks must call it.

    guesses [n] and labels [n] of this rank's samples, n may differ; returns int64 [classes, classes] on their device,
    row = label, column = guess. Raises ValueError on every rank when one of them has a class outside 0 to classes - 1.
    """
    fault = "" if guesses.shape == labels.shape else f"has {len(guesses)} guesses for {len(labels)} labels"
    for name, values in (("label", labels), ("guess", guesses)):
        outside = values[(values < 0) | (values >= classes)]
        if not fault and len(outside):
            fault = f"has the {name} {int(outside[0])}: classes are 0 to {classes - 1}"
    _raise_first(_gather(fault))
    pairs = labels.long() * classes + guesses.long()
    counts = torch.bincount(pairs, minlength=classes * classes).to(collective_device())
    if is_initialized():
        dist.all_reduce(counts)
    return counts.reshape(classes, classes).to(labels.device)


def class_accuracy(matrix: Tensor) -> Tensor:
    """Return the accuracy of each class, float64 [classes], from a confusion matrix; nan for a class of no samples."""
    return matrix.diagonal().double() / matrix.sum(1)


def in_dataset_order(mine: Tensor, n: int) -> Tensor:
    """Put the rows of all ranks' shards into the order of the data set; all ranks must call it.

    mine [len(shard(n, rank, world_size)), ...] has a row for each sample of this rank's shard, in its order; returns
    [n, ...] on every rank, on the device of `mine`. Raises ValueError on every rank when one has other rows.
    """
    size = world_size()
    everyone = _gather((len(mine), f"{list(mine.shape[1:])}, {mine.dtype}"))
    faults = []
    for r, (rows, kind) in enumerate(everyone):
        expected = len(shard(n, r, size))
        fault = f"has {rows} rows for the {expected} samples of its shard" if rows != expected else ""
        other = f"has rows of shape {kind}, and rank 0 of shape {everyone[0][1]}" if kind != everyone[0][1] else ""
        faults.append(fault or other)
    _raise_first(faults)
    if size == 1 or n == 0:
        return mine.clone()
    padded = mine.new_zeros((math.ceil(n / size), *mine.shape[1:]), device=collective_device())
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.stack(parts, dim=1).flatten(0, 1)[:n].to(mine.device)  # row k of rank r is sample k * size + r


class EarlyStopping:
    """Stop all ranks at the same step, once a loss has not fallen for `patience` calls.

    Give every rank the same loss, one that was reduced. All ranks must make each call: if one of them wants to stop,
    all do. A nan is no improvement.
    """

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def __call__(self, loss: float) -> bool:
        """Take the newest loss and return True, on every rank, if it is time to stop; all ranks must call it."""
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return any_rank(self.waited >= self.patience)


def _gather(value: Any) -> list[Any]:
    """Return every rank's value in rank order."""
    values = [value] * world_size()
    if is_initialized():
        dist.all_gather_object(values, value)
    return values


def _raise_first(faults: list[str]) -> None:
    """Raise ValueError for the first rank with a fault; every rank has the same list, so all raise or none."""
    for r, fault in enumerate(faults):
        if fault:
            raise ValueError(f"rank {r} {fault}")


def _other_names(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Say in which names two dictionaries differ, "" if in none."""
    lacks, adds = sorted(map(repr, expected.keys() - found)), sorted(map(repr, found.keys() - expected))
    parts = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(adds)} in addition"] * bool(adds)
    return f"{' and '.join(parts)}: the metrics of rank 0 are {', '.join(map(repr, expected))}" if parts else ""
