"""One loader per rank: its shard, a new order in each epoch, and random streams of its own (needs torch alone)."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

T = TypeVar("T")


def stream_seed(seed: int, rank: int, epoch: int = 0, worker: int = 0) -> int:
    """Return a seed below 2**63 for one random stream; any rank may call it.

    Two different (seed, rank, epoch, worker) give unrelated streams: seed + rank would give seed 0 on rank 1 the
    stream of seed 1 on rank 0.
    """
    digest = hashlib.sha256(f"{seed}/{rank}/{epoch}/{worker}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class EpochSampler(DistributedSampler[T]):
    """A DistributedSampler that warns when a pass repeats the order of the pass before, without `set_epoch`."""

    _last: int | None = None

    def __iter__(self) -> Iterator[T]:
        if self.shuffle and self._last == self.epoch:
            warnings.warn(
                f"this pass has the order of the one before it: call sampler.set_epoch(epoch) before each epoch, with "
                f"the same number on every rank (it is still {self.epoch})",
                stacklevel=2,
            )
        self._last = self.epoch
        return super().__iter__()


class EpochLoader(DataLoader[T]):
    """A DataLoader that counts its passes: each has its own order and its own random streams in the workers.

    `epoch` is the number of the next pass; set it, alike on all ranks, to continue an earlier run. A pass counts from
    its second batch on, so that one rank may look at a first batch and still deal like the others.
    """

    epoch: int = 0
    stream: tuple[int, int] = (0, 0)  # seed and rank

    def __iter__(self) -> Any:
        epoch = self.epoch
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        self.generator.manual_seed(stream_seed(*self.stream, epoch))  # the workers' seeds are drawn from it
        for step, batch in enumerate(super().__iter__()):
            if step == 1:
                self.epoch = epoch + 1
            yield batch
        self.epoch = epoch + 1


def make_loader(
    dataset: Dataset[T],
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool | None = None,
) -> EpochLoader[T]:
    """Return the loader of one rank, with `batch_size` samples per rank; each rank calls it with its own `rank`.

    No process group is needed. All ranks make the same number of steps: the sampler repeats a few samples, or leaves
    some out with `drop_last`. `seed` is the same on every rank and shuffles for all, as DistributedSampler does.
    Augmentation in worker processes is random for each rank, worker and epoch, and the same in every run; without
    workers it uses the rank's own random state: seed that with `stream_seed(seed, rank)`. The data set's own `collate`
    is used if it has one. `pin_memory` defaults to whether there is a GPU. Raises ValueError for a rank outside the
    world.
    """
    sampler: DistributedSampler[T] = DistributedSampler(
        dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    loader = EpochLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=getattr(dataset, "collate", None),
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        drop_last=drop_last,
        generator=torch.Generator(),
    )
    loader.stream = seed, rank
    return loader
