"""Wrap a model and train it for one epoch: needs torch, and process_group.py beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .process_group import collective_device, is_initialized, rank, unwrap, world_size


def wrap(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a model to `device` and wrap it in DDP; all ranks must call it, with the same architecture.

    On a GPU BatchNorm becomes SyncBatchNorm first; on a CPU, where that does not exist, rank 0 prints a note. At world
    size 1 the model comes back without a wrapper.
    """
    device = torch.device(device)
    model = model.to(device)
    if world_size() == 1:
        return model
    gpu = device.type == "cuda"
    if gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif rank() == 0 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        print("Note: SyncBatchNorm needs GPUs; on CPUs each rank's BatchNorm sees its own batch only.")
    return DistributedDataParallel(model, device_ids=[device] if gpu else None)


def train_epoch(
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    epoch: int,
    device: torch.device | str = "cpu",
    log_every: int = 10,
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.nll_loss,
) -> float:
    """Train for one epoch and return the mean loss per sample over all ranks; all ranks must call it.

    `loader` yields (inputs [b, ...], labels [b]) of this rank's shard, as many batches on each rank; `loss_fn` is a
    mean over the batch. Call `sampler.set_epoch(epoch)` before. Every `log_every` steps (0: never) rank 0 prints how
    many samples of its shard it has seen, and the loss of the current batch. No samples at all give nan.
    """
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=device)  # on the device: .item() in each step would wait for it
    seen, shard_size = 0, len(loader.sampler)  # type: ignore[arg-type]
    for step, (inputs, labels) in enumerate(loader, start=1):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
        seen += len(labels)
        total += loss.detach().double() * len(labels)
        if log_every and step % log_every == 0 and rank() == 0:
            percent = f"{100 * seen / shard_size:.0f}%"
            print(f"Train Epoch: {epoch} [{seen}/{shard_size} ({percent})]  Loss: {loss.item():.6f}")
    sums = torch.stack([total, total.new_tensor(seen)]).to(collective_device())
    if is_initialized():
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.nll_loss,
) -> Tensor:
    """Add up the gradients of several micro-batches as those of one large batch; all ranks must call it.

    A micro-batch is (inputs [b, ...], labels [b]) on the model's device; sizes may differ. Only the last backward
    synchronises, so a step costs one set of all-reduces; call `optimizer.step()` after it. `loss_fn` is a mean over
    the batch. Returns the mean loss over this rank's samples, without its graph. Raises ValueError for an empty list.
    """
    if not micro_batches:
        raise ValueError("no micro-batches: every rank needs at least one in every step")
    count = sum(len(labels) for _, labels in micro_batches)
    total = torch.zeros((), device=micro_batches[0][1].device)
    for number, (inputs, labels) in enumerate(micro_batches, start=1):
        local = number < len(micro_batches) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if local else contextlib.nullcontext():  # type: ignore[operator]  # the forward too
            loss = loss_fn(model(inputs), labels) * (len(labels) / count)
            loss.backward()
        total += loss.detach()
    return total


def unused_parameters(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters without a gradient; call it after a backward, on any rank.

    Names carry no `module.`. An empty list says that every parameter took part in the loss. No rank needs the others.
    """
    return [name for name, p in unwrap(model).named_parameters() if p.requires_grad and p.grad is None]
