"""Write a notebook's outputs: `python tools/run_notebook.py 06`, or `make run NB=06`. No other way is used.

The notebook runs from a clean kernel in its own folder; the file changes only when every cell went well.
`--check` runs it the same way, compares with what is saved and writes nothing.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager
from nbval.plugin import coalesce_streams, get_sanitize_patterns

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
SANITIZERS = ROOT / "tests" / "nbval_sanitize.cfg"
CELL_DEADLINE = 300  # seconds, as in conftest.py
IGNORED = "nbval-ignore-output"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"name": "python"}

Rules = Sequence[tuple[str, str]]


class RunError(Exception):
    """A notebook could not be found, or did not run to its end."""


def notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """List the notebooks of the series, in order."""
    return sorted(folder.glob("*.ipynb"))


def find(name: str, folder: Path = NOTEBOOKS) -> Path:
    """Return the notebook that a path or a number such as "06" names; raises RunError unless it is one."""
    if name.endswith(".ipynb"):
        matches = [Path(name)] if Path(name).is_file() else []
    else:
        matches = sorted(folder.glob(f"{name}_*.ipynb"))
    if len(matches) != 1:
        there = ", ".join(path.name for path in notebooks(folder)) or "none"
        raise RunError(
            f"{name!r} names {len(matches)} notebooks, and exactly one was needed. "
            f"Give the number in front of a file name, such as NB=06. In {folder}: {there}."
        )
    return matches[0].resolve()


def read(path: Path) -> NotebookNode:
    """Read a notebook."""
    return nbformat.read(path, as_version=4)


def tags(cell: NotebookNode) -> list[str]:
    """Return a cell's tags."""
    return list(cell.metadata.get("tags", []))


def execute(nb: NotebookNode, folder: Path) -> NotebookNode:
    """Run a copy of the notebook in a clean kernel of this environment, in folder; raises RunError."""
    # DDP_MNIST would swap the data under the saved numbers; PYTEST_CURRENT_TEST turns off ipykernel's capture
    env = {k: v for k, v in os.environ.items() if k not in ("DDP_MNIST", "PYTEST_CURRENT_TEST")}
    manager = AsyncKernelManager(kernel_name=CURRENT_ENV_KERNEL_NAME, kernel_spec_manager=NbvalKernelspecManager())
    client = NotebookClient(
        copy.deepcopy(nb),
        km=manager,
        timeout=CELL_DEADLINE,
        iopub_timeout=30,
        coalesce_streams=True,
        record_timing=False,
        extra_arguments=["--log-level=ERROR", "--HistoryManager.hist_file=:memory:"],
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        return client.execute(env=env, cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RunError(str(error)) from error


def normalise(nb: NotebookNode) -> NotebookNode:
    """Return a copy that says nothing about this machine: minimal metadata, relative paths in tracebacks."""
    nb = copy.deepcopy(nb)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    for cell in nb.cells:
        cell.metadata = nbformat.from_dict({"tags": tags(cell)} if tags(cell) else {})
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if output.output_type == "error":
                output.traceback = [line.replace(f"{ROOT}/", "") for line in output.traceback]
    return nb


def write(nb: NotebookNode, path: Path) -> None:
    """Replace the file at once, or not at all."""
    nbformat.validate(nb)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rules(path: Path = SANITIZERS) -> Rules:
    """Read the sanitizers as nbval reads them: (regex, replacement) pairs in order."""
    return get_sanitize_patterns(path.read_text(encoding="utf-8"))


def sanitize(text: str, rules: Rules) -> str:
    """Apply every rule in order, as nbval does."""
    for regex, replacement in rules:
        text = re.sub(regex, replacement, text)
    return text


def compared_fields(output: NotebookNode) -> Iterator[tuple[NotebookNode, str]]:
    """Yield (holder, key) for each text of an output that nbval compares; holder[key] is the text."""
    if output.output_type == "stream":
        yield output, "text"
    elif output.output_type == "error":
        yield output, "ename"
        yield output, "evalue"
    else:
        for key in sorted(output.data):  # a saved file has them in this order
            if key not in ("image/png", "image/jpeg"):
                yield output.data, key


def compared_texts(cell: NotebookNode, rules: Rules = ()) -> list[tuple[str, str]]:
    """Return (field name, sanitized text) for each output field of a code cell that is compared, in order."""
    if cell.cell_type != "code" or IGNORED in tags(cell):
        return []
    texts = []
    for output in coalesce_streams(copy.deepcopy(cell.outputs)):
        for holder, key in compared_fields(output):
            name = output.name if output.output_type == "stream" else key
            texts.append((name, sanitize(str(holder[key]), rules)))
    return texts


def difference(saved: NotebookNode, fresh: NotebookNode, rules: Rules) -> str | None:
    """Describe the first sanitized text in which two runs of a notebook differ; None when there is none."""
    for index, (old_cell, new_cell) in enumerate(zip(saved.cells, fresh.cells, strict=True)):
        old_texts, new_texts = compared_texts(old_cell, rules), compared_texts(new_cell, rules)
        for (old_name, old), (new_name, new) in zip(old_texts, new_texts, strict=False):
            if old_name != new_name:
                return f"cell {index}: {old_name} is saved where the run gave {new_name}"
            if old != new:
                old_lines, new_lines = [*old.split("\n"), None], [*new.split("\n"), None]
                at = next(i for i, (a, b) in enumerate(zip(old_lines, new_lines, strict=False)) if a != b)
                was = "nothing" if old_lines[at] is None else repr(old_lines[at])
                now = "nothing" if new_lines[at] is None else repr(new_lines[at])
                return f"cell {index}, {old_name} line {at + 1}: saved {was}, now {now}"
        if len(old_texts) != len(new_texts):
            return f"cell {index}: {len(old_texts)} output texts are saved, the run gave {len(new_texts)}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one notebook and write or check its outputs; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run a notebook from a clean kernel and write its outputs.")
    parser.add_argument("notebook", help="a number, such as 06, or the path of a notebook")
    parser.add_argument("--check", action="store_true", help="compare with what is saved and write nothing")
    options = parser.parse_args(argv)
    try:
        path = find(options.notebook)
        saved, start = read(path), time.perf_counter()
        fresh = normalise(execute(saved, path.parent))
    except RunError as error:
        print(error, "Nothing was written.", sep="\n", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    if not options.check:
        write(fresh, path)
        print(f"wrote {path} ({seconds:.0f} s)")
        return 0
    found = difference(saved, fresh, read_rules())
    print(f"{path.name}: {found or 'identical'} ({seconds:.0f} s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
