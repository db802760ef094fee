"""Save and resume, bit for bit: needs torch, and process_group.py beside it.

position = load_checkpoint(path, missing=Position(), model=model, optimizer=optimizer)
while position.epoch < epochs:
    for inputs, labels in position.batches(loader):  # those of this epoch that are not used yet
        ...  # forward, backward, optimizer.step()
        save_checkpoint(path, position, model=model, optimizer=optimizer)  # here, or after an epoch, or both
"""

from __future__ import annotations

import os
import random
import re
import sys
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .process_group import _gather, checksum, is_initialized, rank, unwrap, world_size

T = TypeVar("T")
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, read or used; raised on every rank, with the same text."""


class Position:
    """Where a run stands: in `epoch`, with `step` of its batches used, and `extra`, a dict of your own plain values."""

    def __init__(self, epoch: int = 0, step: int = 0, extra: dict[str, Any] | None = None) -> None:
        self.epoch, self.step, self.extra = epoch, step, extra or {}
        self._loader = ""  # what `step` counts the batches of
        self._start: Any = None  # this rank's random numbers at the start of the epoch
        self._now: Any = None  # and those with which a loaded run goes on

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches that are left of this epoch, counting them in `step`; in the end `epoch` grows.

        All ranks must call it. It calls `set_epoch` of the sampler. A resumed epoch makes its used batches once more,
        with the random numbers that they had, and drops them. Raises CheckpointError if they come from another loader.
        DataLoader workers may draw random numbers, but not with persistent_workers=True or a generator= of their own.
        """
        sampler: Any = getattr(loader, "sampler", loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        found = f"{length_hint(loader)} batches, {length_hint(sampler)} samples, seed {getattr(sampler, 'seed', None)}"
        if self.step and found != self._loader:
            text = f"{self.step} steps of epoch {self.epoch} used a loader with {self._loader}; this one has {found}"
            raise CheckpointError(f"{text}. Resume with the old data, batch size and seed, or from an epoch's end")
        now, self._now, self._loader = self._now or _random_state(), None, found
        if not self.step:
            self._start = now
        _set_random_state(self._start)
        batches = iter(loader)  # draws the seed of the workers, and the order where a sampler has no seed
        if self.step:
            deque(islice(batches, self.step), maxlen=0)
            _set_random_state(now)
        for batch in batches:
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0


def save_checkpoint(path: str | Path, position: Position, **parts: Any) -> None:
    """Write `parts` (model=, optimizer=, scheduler=, … : all that has a state_dict) and where the run stands.

    All ranks must call it, as the last thing of a step or an epoch. Rank 0 writes PATH.partial, which becomes PATH when
    it is on the disk; the PATH before it becomes PATH.previous. A model's keys carry no `module.` or `_orig_mod.`.
    Raises CheckpointError on every rank when rank 0 can't write, for a value that weights_only=True would not load
    (naming it), and when the ranks are not at the same step.
    """
    place = {"epoch": position.epoch, "step": position.step, "extra": position.extra, "loader": position._loader}
    ranks = _gather(((position.epoch, position.step), {"start": position._start, "now": _random_state()}))

    def write() -> None:
        if len({where for where, _ in ranks}) > 1:
            raise ValueError(f"the ranks are not at the same (epoch, step): {[where for where, _ in ranks]}")
        content = {name: _state(part) for name, part in parts.items()}
        content["position"] = place | {"world_size": world_size(), "random": [numbers for _, numbers in ranks]}
        _refuse_objects(content)
        _write(Path(path), content)

    _on_rank_0(write, f"{path} was not saved: ")


def load_checkpoint(path: str | Path, *, missing: Position | None = None, **parts: Any) -> Position:
    """Load `parts` from PATH, or from PATH.previous where PATH is missing or damaged; return where the run stands.

    All ranks must call it. Rank 0 alone reads, with weights_only=True and to the CPU; the others need not see the file.
    Each rank's random numbers go on where they were. Another world size fits only the end of an epoch, and random
    numbers start anew. `missing` is returned where rank 0 has neither file. Raises CheckpointError on every rank.
    """
    visible = [r for r, sees in enumerate(_gather(os.path.isfile(path))) if sees]
    content, notes = _on_rank_0(lambda: _read(Path(path), visible, missing))
    if content is None:
        return missing or Position()
    saved, size, fault = content["position"], world_size(), None
    if (before := saved["world_size"]) != size:
        was = f"{path} was saved at world size {before}, and this is world size {size}"
        if saved["step"]:
            where = f"in the middle of an epoch (epoch {saved['epoch']}, step {saved['step']})"
            raise CheckpointError(f"{was}: {where} only the old world size fits. Take a checkpoint of an epoch's end")
        notes.append(f"{was}: random numbers (dropout, augmentation) start anew.")
    if rank() == 0 and notes:
        print("Note:", *notes)
    try:  # a rank that raised here would leave the others waiting
        for name, part in parts.items():
            if name not in content:
                raise ValueError(f"it has no {name!r}, only {', '.join(content)}")
            _load_state(part, content[name])
    except Exception as error:
        fault = str(error) or type(error).__name__
    for r, theirs in enumerate(_gather(fault)):
        if theirs:
            raise CheckpointError(f"{path} does not fit this run (rank {r}): {theirs}")
    position = Position(saved["epoch"], saved["step"], saved["extra"])
    if before == size:
        position._loader, position._start = saved["loader"], saved["random"][rank()]["start"]
        _set_random_state(saved["random"][rank()]["now"])
    else:
        random.seed(seed := int(checksum([saved["random"][0]["now"]["torch"]])[:7], 16) + rank())
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
    position._now = _random_state()
    return position


def _on_rank_0(work: Callable[[], T], failed: str = "") -> T:
    """Do `work` on rank 0; return its result, or raise its error, on every rank."""
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = failed + _reason(error)
    if is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1]:
        raise CheckpointError(outcome[1])
    return outcome[0]


def _write(path: Path, content: dict[str, Any]) -> None:
    """Put a new file in the place of `path` and keep the old one; a crash at any moment leaves a whole file."""
    new, previous = Path(f"{path}.partial"), Path(f"{path}.previous")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(new, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets the name
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if zipfile.is_zipfile(path):  # a truncated one must not take the place of a good one
        previous.unlink(missing_ok=True)
        try:
            os.link(path, previous)
        except OSError:  # no hard links on this file system: for a moment there is only the previous file
            os.replace(path, previous)
    os.replace(new, path)
    if hasattr(os, "O_DIRECTORY"):  # Windows can't open a folder
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)  # the new names, too
        os.close(folder)


def _read(path: Path, visible: list[int], missing: Position | None) -> tuple[Any, list[str]]:
    """Return the newest whole checkpoint and what there is to say about it, or None where neither file exists."""
    faults: list[str] = []
    for file in (path, Path(f"{path}.previous")):
        try:
            with zipfile.ZipFile(file) as records:
                if records.testzip():  # compares checksums: torch.load does not notice a changed byte
                    raise zipfile.BadZipFile
            content = torch.load(file, map_location="cpu", weights_only=True)
            if "position" not in content:
                raise ValueError("save_checkpoint did not write it")
            return content, [*faults, f"Loaded {file}."] if faults else []
        except FileNotFoundError:
            faults.append(f"{file} does not exist.")
        except zipfile.BadZipFile:
            faults.append(f"{file} is truncated or damaged.")
        except Exception as error:
            faults.append(f"{file} can't be loaded: {_reason(error)}.")
    if missing and not visible and all(fault.endswith("not exist.") for fault in faults):
        return None, []
    if visible and 0 not in visible:
        faults.append(f"Rank 0 reads it, and only these ranks can see it: {visible}.")
    raise CheckpointError(" ".join(faults))


def _reason(error: BaseException) -> str:
    """Say in one line what went wrong."""
    if found := re.search(r"GLOBAL:? (\S+)", str(error)):
        return f"it refers to {found[1]}, which is neither tensor nor plain value, and could run code"
    cause: Any = error if isinstance(error, OSError) else error.__context__  # torch hides what the disk said
    return getattr(cause, "strerror", None) or str(error).split("\n")[0] or type(error).__name__


def _refuse_objects(value: Any, name: str = "") -> None:
    """Raise ValueError, naming the value, for what weights_only=True would not load."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, inner in value.items():
            _refuse_objects(key, f"a key of {name}")
            _refuse_objects(inner, f"{name}[{key!r}]" if name else key)
    elif type(value) in (list, tuple, set):
        for index, inner in enumerate(value):
            _refuse_objects(inner, f"{name}[{index}]")
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor):
        kind = type(value).__qualname__
        raise ValueError(f"{name} is a {kind}: store tensors and plain values, such as float(x), str(path), vars(args)")


def _state(part: Any) -> Any:
    if not isinstance(part, nn.Module):
        return part.state_dict()
    return {name.replace("_orig_mod.", ""): value for name, value in unwrap(part).state_dict().items()}


def _load_state(part: Any, state: Any) -> None:
    if isinstance(part, nn.Module):
        part = unwrap(part)
        names = {name.replace("_orig_mod.", ""): name for name in part.state_dict()}  # a compiled layer inside
        state = {names.get(name, name): value for name, value in state.items()}
    part.load_state_dict(state)


def _random_state() -> dict[str, Any]:
    """Return this rank's random number generators: Python's, NumPy's if loaded, torch's on the CPU and its GPU."""
    numpy = sys.modules.get("numpy")
    name, key, *rest = numpy.random.get_state() if numpy else ("", torch.empty(0))
    return {
        "python": random.getstate(),
        "numpy": (name, key.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"][0] and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
