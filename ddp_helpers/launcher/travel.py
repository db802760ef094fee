"""What travels between the notebook and the ranks: bytes made by cloudpickle, tensors as CPU copies."""

import importlib
import inspect
import io
import linecache
import marshal
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

LARGE = 10_000_000  # bytes; more than this in one message is worth a warning
loads = pickle.loads


class TravelError(TypeError):
    """A value can't be sent to another process."""


def cell_label(filename: str) -> str | None:
    """Return "cell 7" for the file name that IPython gave to the code of cell 7, else None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number = shell and getattr(shell.compile, "_filename_map", {}).get(filename)
    return f"cell {number}" if number is not None and number is not False else None


def _relabel(code: types.CodeType, label: str) -> types.CodeType:
    constants = (_relabel(c, label) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=label, co_consts=tuple(constants))


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.sources: dict[str, str] = {}  # label of a notebook cell -> its text, for tracebacks on the ranks

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # as it is: cloudpickle would drop the file name
            label = cell_label(obj.co_filename)
            if label:
                self.sources[label] = "".join(linecache.getlines(obj.co_filename))
                obj = _relabel(obj, label)
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # torch.backends.cudnn and the like
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided:
            return _plain(obj).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            raise TravelError("a DistributedDataParallel model belongs to its process group: use model.module")
        return super().reducer_override(obj)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on the CPU, without its graph, and without a larger storage behind it."""
    copy = tensor
    if tensor.grad_fn is not None:
        copy = copy.detach()
    if tensor.device.type not in ("cpu", "meta"):
        copy = copy.detach().cpu().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    elif tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() > tensor.nbytes:
        copy = copy.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    if isinstance(tensor, torch.nn.Parameter) and copy is not tensor:
        copy = torch.nn.Parameter(copy.detach(), tensor.requires_grad)
    return copy


def dumps(value: Any) -> tuple[bytes, dict[str, str]]:
    """Return the bytes of `value` and the sources of the notebook cells in it; raise TravelError by name."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except TravelError:
        raise
    except Exception as error:
        name, reason = _culprit(value) or ("this value", error)
        raise TravelError(f"{name} can't be sent to another process: {reason}") from error
    return buffer.getvalue(), pickler.sources


def rebuild(data: bytes, rank: int) -> Any:
    """Return a rank's result."""
    try:
        return loads(data)
    except Exception as error:
        text = f"rank {rank} sent its result, but it can't be rebuilt here: {type(error).__name__}: {error}"
        raise TravelError(text) from error


def dumps_call(function: Any, args: tuple) -> tuple[bytes, dict[str, str]]:
    """Like `dumps`, for a function and its arguments; warns when they carry more than 10 MB along."""
    data, sources = dumps((function, args))
    if len(data) > LARGE:
        sizes = {name: len(dumps(part)[0]) for name, part in _parts((function, args))}
        while sizes and (largest := max(sizes, key=lambda name: sizes[name])) == "the function":
            sizes = {name: len(dumps(part)[0]) for name, part in _parts(function)}
        text = f"; the largest part is {largest} ({sizes[largest] / 1e6:.0f} MB)" if sizes else ""
        warnings.warn(
            f"{len(data) / 1e6:.0f} MB travel to each rank{text}. Build large data inside the function.",
            stacklevel=3,
        )
    return data, sources


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, part) for what `value` drags along: closure, globals, items, attributes."""
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f"variable '{name}'", part) for name, part in {**used.nonlocals, **used.globals}.items())
    elif isinstance(value, tuple) and len(value) == 2 and callable(value[0]) and isinstance(value[1], tuple):
        yield "the function", value[0]
        yield from ((f"argument {i}", part) for i, part in enumerate(value[1]))
    elif isinstance(value, dict):
        yield from ((f"'{name}'", part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {i}", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        yield from ((f"attribute '{name}'", part) for name, part in vars(value).items())


def _culprit(value: Any, depth: int = 0) -> tuple[str, Exception] | None:
    """Return the name of the innermost part of `value` that can't be pickled, and why."""
    for name, part in _parts(value) if depth < 8 else ():
        try:
            _Pickler(io.BytesIO()).dump(part)
        except Exception as error:
            inner = _culprit(part, depth + 1)
            if inner is None:
                return f"{name} (of type {type(part).__name__})", error
            return inner if name == "the function" or "variable" in inner[0] else (f"{name}: {inner[0]}", inner[1])
    return None
