"""Join, leave and agree within the process group: needs torch alone.

Without a group every function answers as the only rank of a world of size 1.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def is_initialized() -> bool:
    """Say whether this process is in a group; any rank may ask, at any time."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 without a group; any rank may ask."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a group; any rank may ask."""
    return dist.get_world_size() if is_initialized() else 1


def setup(backend: str | None = None) -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; all ranks must call it.

    Does nothing in a group already, and without RANK in the environment: then the world size is 1. No backend means
    nccl where each rank of the node has a GPU of its own, else gloo.
    """
    if is_initialized() or "RANK" not in os.environ:
        return
    if backend is None:
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
        backend = "nccl" if local_ranks <= gpus else "gloo"
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)  # what collectives without a device of their own use
        dist.init_process_group(backend, device_id=device)
    else:
        dist.init_process_group(backend)  # device_id= is for GPUs: it raises on a CPU


def teardown() -> None:
    """Leave the process group; all ranks must call it, after `del` of their DDP models. No-op without a group.

    Collects garbage first: a DDP model that outlives its group may abort the process when the interpreter ends.
    """
    gc.collect()
    if is_initialized():
        dist.destroy_process_group()


def all_ranks_ok(ok: bool) -> bool:
    """Return True if `ok` is true on every rank; all ranks must call it."""
    return not any_rank(not ok)


def any_rank(flag: bool) -> bool:
    """Return True if `flag` is true on at least one rank; all ranks must call it."""
    if not is_initialized():
        return bool(flag)
    flags = torch.tensor(int(bool(flag)), device=collective_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def collective_device() -> torch.device:
    """Return the device whose tensors this group's collectives take: this rank's GPU with nccl, else the CPU."""
    nccl = is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a DDP wrapper, `torch.compile`'s or both; any other module as it is."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def assert_in_sync(values: nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]) -> None:
    """Check that the ranks hold the same bits; all ranks must call it.

    `values` is a module (its parameters, then its buffers, of any shape, dtype and device) or tensors. One checksum per
    tensor travels, and a whole tensor only after a difference. Raises the same AssertionError on every rank, naming the
    first parameter, buffer or tensor that differs and by how much, or that not every rank has in this place, shape and
    dtype; RuntimeError on every rank when one of them can't read its values.
    """
    tensors: list[tuple[str, Tensor]] = []
    try:  # a rank that raised here would leave the others waiting
        tensors = _named(values)
        mine: Any = [(name, str(list(t.shape)), str(t.dtype), checksum([t])) for name, t in tensors]
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    everyone: list[Any] = _gather(mine)
    for r, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise RuntimeError(f"rank {r} can't read the values to compare: {theirs}")
    for index in range(max(map(len, everyone))):
        rows = [theirs[index] if index < len(theirs) else None for theirs in everyone]
        kinds = [row and row[:3] for row in rows]  # name, shape and dtype, or None
        for r, row in enumerate(rows):
            if kinds[r] != kinds[0]:
                raise AssertionError(
                    f"the ranks hold different things: at place {index}, rank 0 has {_text(rows[0])} and rank {r} has "
                    f"{_text(row)}. Build the model, or collect the tensors, in the same way on every rank."
                )
        if len(set(rows)) > 1:
            name, tensor = tensors[index]
            raise AssertionError(
                f"the ranks are out of sync: {name} {_difference(tensor)}. It was changed on one rank alone, by a load "
                "after the wrap, an unaveraged gradient or a step past the wrapper, say. Repair that, then broadcast "
                "rank 0's values or wrap the model again."
            )


def _named(values: nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(values, nn.Module):
        module = unwrap(values)
        parameters = [(f"parameter {name}", p.detach()) for name, p in module.named_parameters()]
        return parameters + [(f"buffer {name}", b.detach()) for name, b in module.named_buffers()]
    if isinstance(values, Mapping):
        return [(f"tensor {name}", t.detach()) for name, t in values.items()]
    return [(f"tensor {i}", t.detach()) for i, t in enumerate([values] if isinstance(values, Tensor) else values)]


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return the sha256 of the tensors' bytes, one after the other, as 64 hex digits; any shape, dtype and device."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _gather(value: Any) -> list[Any]:
    """Return every rank's value in rank order."""
    values = [value] * world_size()
    if is_initialized():
        dist.all_gather_object(values, value)
    return values


def _text(row: tuple[str, str, str, str] | None) -> str:
    return f"{row[0]} of shape {row[1]}, {row[2]}" if row else "nothing"


def _difference(tensor: Tensor) -> str:
    """Say by how much the first rank that differs is away from rank 0; all ranks must call it."""
    received = [tensor.cpu()]
    dist.broadcast_object_list(received, src=0)
    wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
    ours, theirs = tensor.cpu().to(wide), received[0].to(wide)
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    apart = (ours - theirs).abs()[differs].max().item() if differs.any() else None
    rows = _gather((checksum([tensor]) != checksum(received), apart, int(differs.sum())))
    r, (_, apart, count) = next((r, row) for r, row in enumerate(rows) if row[0])
    if apart is None:
        return f"of rank {r} equals rank 0's in value but not bit by bit (0.0 and -0.0, say)"
    return f"of rank {r} is up to {apart:.3g} away from rank 0's, in {count:,} of {tensor.numel():,} elements"
