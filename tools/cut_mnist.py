"""Cut the embedded subset out of the official MNIST files: every fifth image.

python tools/cut_mnist.py [FOLDER] [--out OUT]      FOLDER holds the raw or .gz files; default DDP_MNIST_ROOT

It verifies the official md5 checksums first, writes four .gz files that are the same bytes on every run, and
prints the table that ddp_helpers/data.py checks them against.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import math
import os
from pathlib import Path

from ddp_helpers.data import EMBEDDED, FILES, read_folder

# 12,000 for training; one fewer than 2,000 for testing, because an odd number lets padding show.
INDICES = {"train": range(0, 60_000, 5), "t10k": range(0, 9_995, 5)}


def cut(content: bytes, indices: range) -> bytes:
    """Return the IDX file that holds only the items at `indices` of the IDX file `content`."""
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, 4 + 4 * content[3], 4)]
    start, size = 4 + 4 * len(shape), math.prod(shape[1:])
    header = content[:4] + len(indices).to_bytes(4, "big") + content[8:start]
    return header + b"".join(content[start + size * i : start + size * (i + 1)] for i in indices)


def pack(content: bytes) -> bytes:
    """Compress without a name or a time, so that equal content gives equal bytes."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


def cut_subset(folder: Path) -> dict[str, bytes]:
    """Return name -> IDX bytes of the subset; raises ValueError if a file in `folder` is not the official one."""
    return {name: cut(data, INDICES[name.split("-")[0]]) for name, data in read_folder(folder, FILES["full"]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=os.environ.get("DDP_MNIST_ROOT"))
    parser.add_argument("--out", type=Path, default=EMBEDDED)
    arguments = parser.parse_args()
    if arguments.folder is None:
        parser.error("no folder: name the one that holds the official files, or set DDP_MNIST_ROOT to it")
    arguments.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, content in cut_subset(Path(arguments.folder)).items():
        packed = pack(content)
        (arguments.out / f"{name}.gz").write_bytes(packed)
        total += len(packed)
        count = int.from_bytes(content[4:8], "big")
        print(f'    "{name}": "{hashlib.md5(content, usedforsecurity=False).hexdigest()}",  # {count:,} items')
    print(f"{total:,} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
