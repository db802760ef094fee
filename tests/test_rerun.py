"""Every notebook starts its ranks by torch.multiprocessing.spawn, and each cell of its body can be run again."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from run_notebook import RunError, execute, notebooks, read

SPY = """
import torch.multiprocessing

spawned, _spawn = [], torch.multiprocessing.spawn


def _spy(fn, *args, **kwargs):
    spawned.append(fn.__module__)
    return _spawn(fn, *args, **kwargs)


torch.multiprocessing.spawn = _spy
"""
LONG = ("01", "06", "08", "10")  # notebooks
COUNT = "print(spawned.count('ddp_helpers.launcher.rank'))"


def spied_on(nb: NotebookNode) -> NotebookNode:
    """Return a copy in which each code cell but the first runs twice, and the last output counts the launches."""
    cells: list[NotebookNode] = [new_code_cell(SPY)]
    for index, cell in enumerate(nb.cells):
        cells.append(copy.deepcopy(cell))
        if cell.cell_type == "code" and index > 1:
            cells.append(new_code_cell(cell.source, metadata=copy.deepcopy(cell.metadata)))
    return NotebookNode({**nb, "cells": [*cells, new_code_cell(COUNT)]})


def launches(nb: NotebookNode, folder: Path) -> int:
    """Run the notebook as `spied_on` changes it; return how often it started ranks."""
    return int(execute(spied_on(nb), folder).cells[-1].outputs[0].text)


def notebook(*sources: str) -> NotebookNode:
    """Return a notebook of these code cells, with a cell of prose in front."""
    cells = [new_code_cell(source) for source in sources]
    return NotebookNode(
        nbformat=4, nbformat_minor=5, metadata={}, cells=[NotebookNode(cells[0], cell_type="raw"), *cells]
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_each_cell_can_run_again(path: Path) -> None:
    if path.stem[:2] in LONG and "DDP_REPEAT" not in os.environ:
        pytest.skip("takes two to three minutes: set DDP_REPEAT, to 1 for example")
    assert launches(read(path), path.parent) >= 3  # Ranks, and In one piece twice


def test_a_cell_that_can_run_once_is_found(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="NameError"):
        launches(notebook("x = 1", "del x"), tmp_path)


def test_only_the_launcher_counts(tmp_path: Path) -> None:
    start = "from ddp_helpers import launch\ndef f(rank): pass\nlaunch(f, nprocs=1);"
    bare = "try:\n    torch.multiprocessing.spawn(print, nprocs=0)\nexcept Exception: pass"
    assert launches(notebook("x = 1", bare), tmp_path) == 0
    assert launches(notebook(start), tmp_path) == 1
