"""MNIST for every rank: needs torch and torchvision; copy the mnist/ folder for the embedded subset.

Call `prepare_mnist()` once in the notebook; then `load_mnist(root, train)` on each rank serves whole batches.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import os
import socket
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

FILES: dict[str, dict[str, str | None]] = {  # name of each raw IDX file -> its md5
    "full": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "subset": {
        "train-images-idx3-ubyte": "87ce1dccb554df0504a7828a1ee722ee",
        "train-labels-idx1-ubyte": "c711a2238bbb86e5d3108b5e1d011055",
        "t10k-images-idx3-ubyte": "a99acea835fd8d57cbe7069223d20f90",
        "t10k-labels-idx1-ubyte": "94d4167c5d70dbc9baf6771bfb9076c4",
    },
}
EMBEDDED = Path(__file__).parent / "mnist"


def prepare_mnist(full: bool | None = None) -> Path:
    """Make MNIST ready on this machine; return the root that `torchvision.datasets.MNIST(root)` reads.

    Call it in the notebook, before the ranks need data; several processes may call it at once. `full` False is
    the embedded subset: 12,000 and 1,999 images, no network. True is the official set, 60,000 and 10,000: from the
    cache, else the folder DDP_MNIST_ROOT (raw or .gz), else one download, never in a rank. None: DDP_MNIST decides
    ("subset", "full"). The cache is DDP_HELPERS_CACHE or ~/.cache/ddp_helpers or, where that can't be written, in
    the temporary folder. Each call checks each file; a damaged one is named in a warning and replaced.
    Raises ValueError for another DDP_MNIST, RuntimeError with advice when the files can't be had.
    """
    choice = (os.environ.get("DDP_MNIST") or "subset") if full is None else "full" if full else "subset"
    if choice not in FILES:
        raise ValueError(f"DDP_MNIST is {choice!r}: set it to 'subset' or 'full', or unset it (subset)")
    own = os.environ.get("DDP_HELPERS_CACHE") or "~/.cache/ddp_helpers"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    for cache in (own, f"{tempfile.gettempdir()}/ddp_helpers-{user}"):
        root = Path(os.path.expanduser(cache)).absolute() / f"mnist-{choice}"
        raw = root / "MNIST" / "raw"
        with contextlib.suppress(ValueError):
            read_folder(raw, FILES[choice])
            return root
        try:
            raw.mkdir(parents=True, exist_ok=True)
            lock = open(f"{root}.lock", "a")  # noqa: SIM115
        except OSError:
            continue
        with lock:
            with contextlib.suppress(ImportError, OSError):  # no locks here: then the last rename wins
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                read_folder(raw, FILES[choice])  # another process may have been faster
            except ValueError as error:
                if any(raw.iterdir()):
                    warnings.warn(f"{error}; making it again", stacklevel=2)
                with tempfile.TemporaryDirectory(prefix=f".mnist-{choice}-", dir=root.parent) as scratch:
                    for name, content in _fetch(choice, Path(scratch)).items():
                        (Path(scratch) / name).write_bytes(content)
                        os.replace(Path(scratch) / name, raw / name)
        return root
    raise RuntimeError(f"{own} and the temporary folder can't be written: set DDP_HELPERS_CACHE to a folder")


def load_mnist(root: str | Path, train: bool) -> BatchedDataset:
    """Load the training or test images below `root`, on every rank that needs them.

    They stay uint8 [n, 28, 28], labels int64 [n]. Raises RuntimeError that names a missing or damaged file.
    """
    from torchvision.datasets import MNIST  # here, because it takes a second and nothing else needs it

    try:
        read_folder(Path(root) / "MNIST" / "raw", dict.fromkeys(FILES["full"]))
        mnist = MNIST(root, train=train)
        return BatchedDataset(mnist.data, mnist.targets)
    except ValueError as error:
        raise RuntimeError(f"{error}. Call prepare_mnist() in the notebook, and load from its root.") from error


def normalize(images: Tensor) -> Tensor:
    """Turn uint8 images [b, h, w] into float32 [b, 1, h, w] with MNIST's mean 0.1307 and deviation 0.3081."""
    return images.unsqueeze(1).to(torch.float32).div(255).sub_(0.1307).div_(0.3081)


class BatchedDataset(Dataset[tuple[Tensor, Tensor]]):
    """Serve whole batches from images [n, ...] and labels [n, ...] by one index_select.

    `transform` takes a batch of images; None leaves it. A batch of MNIST is float32 [b, 1, 28, 28] and int64 [b].
    It arrives ready: give DataLoader `collate_fn=BatchedDataset.collate`. Raises ValueError for unequal lengths.
    """

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[..., Tensor] | None = normalize):
        if len(images) != len(labels):
            raise ValueError(f"There are {len(images):,} images but {len(labels):,} labels")
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([range(len(self))[index]])  # range checks, and counts from the end
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        images = self.images.index_select(0, index)
        return self.transform(images) if self.transform else images, self.labels.index_select(0, index)

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch as it is: `__getitems__` made it."""
        return batch


def shard(n: int, rank: int, world_size: int) -> range:
    """Return a rank's indices below n: rank, rank + world_size, ..., none twice; raises ValueError for a bad rank."""
    if n < 0 or not 0 <= rank < world_size:
        raise ValueError(f"No shard of {n} samples for rank {rank} of {world_size}: ranks count from 0")
    return range(rank, n, world_size)


def read_folder(folder: Path, files: dict[str, str | None]) -> dict[str, bytes]:
    """Return the content of IDX files (name -> md5 or None), raw or .gz; raises ValueError with each file's fault."""
    contents, faults = {}, []
    for name, md5 in files.items():
        packed = folder / f"{name}.gz"
        path = packed if os.path.exists(packed) else folder / name
        try:
            data = gzip.decompress(path.read_bytes()) if path == packed else path.read_bytes()
        except (OSError, EOFError, zlib.error) as error:
            faults.append(f"{path} can't be read ({getattr(error, 'strerror', None) or error})")
            continue
        shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, 4 + 4 * data[3], 4)] if data[3:] else []
        size = 4 + 4 * len(shape) + math.prod(shape)
        if not shape or len(data) != size:
            faults.append(f"{path} is damaged: its {len(data):,} bytes don't fit its header")
        elif md5 and hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
            faults.append(f"{path} is not the expected file: {shape[0]:,} items, md5 other than {md5}")
        contents[name] = data
    if faults:
        raise ValueError("; ".join(faults))
    return contents


def _fetch(choice: str, scratch: Path) -> dict[str, bytes]:
    """Return the files from mnist/ or DDP_MNIST_ROOT, else as torchvision downloads them to `scratch`."""
    if given := EMBEDDED if choice == "subset" else os.environ.get("DDP_MNIST_ROOT"):
        places = [Path(given).expanduser() / place for place in ("MNIST/raw", "raw", "")]
        place = next((place for place in places if any(place.glob("*-ubyte*"))), places[-1])
        try:
            return read_folder(place, FILES[choice])
        except ValueError as error:
            if choice == "subset":
                raise RuntimeError(f"{error}. Copy the folder mnist/ to where data.py is") from error
            warnings.warn(f"DDP_MNIST_ROOT does not hold MNIST: {error}", stacklevel=3)
    if "RANK" in os.environ or (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "The full MNIST is not on this machine, and a rank does not download it: call prepare_mnist(full=True)"
            " in the notebook, or in one process before the ranks start"
        )
    from torchvision.datasets import MNIST

    timeout, failure = socket.getdefaulttimeout(), ""
    socket.setdefaulttimeout(30)  # seconds without a byte; torchvision would wait for ever
    try:
        for turn in (0, 1, 0):  # begin with the other mirror: torchvision gives up when one breaks off
            mirrors = MNIST.mirrors[turn:] + MNIST.mirrors[:turn]
            try:
                type("MNIST", (MNIST,), {"mirrors": mirrors})(scratch, download=True)
                return read_folder(scratch / "MNIST" / "raw", FILES["full"])
            except Exception as error:
                failure = str(error)
    finally:
        socket.setdefaulttimeout(timeout)
    raise RuntimeError(
        f"MNIST can't be downloaded: {failure}. The embedded subset needs no network (full=False, DDP_MNIST unset);"
        " for the full set put the four official files, raw or .gz, in a folder and set DDP_MNIST_ROOT to it"
    )
