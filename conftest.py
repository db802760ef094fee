"""Settings for `pytest --nbval`, the same from any folder; without --nbval this file changes nothing."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

CELL_DEADLINE = 300.0  # seconds; longer than the ranks' own deadline, so that their hang report comes first
NBVAL_DEADLINE = 2000.0  # nbval's default: any other value was asked for on the command line

sys.path.insert(0, str(Path(__file__).parent / "tools"))  # tests import run_notebook and soak


def pytest_configure(config: pytest.Config) -> None:
    """Give nbval the sanitizers, this environment's kernel and the cell deadline, unless told otherwise."""
    option = config.option
    if not getattr(option, "nbval", False):
        return
    if option.nbval_sanitize_with is None:
        option.nbval_sanitize_with = str(config.rootpath / "tests" / "nbval_sanitize.cfg")
    if option.nbval_kernel_name is None:
        option.nbval_current_env = True
    if option.nbval_cell_timeout == NBVAL_DEADLINE:
        option.nbval_cell_timeout = CELL_DEADLINE
    _number_cells()


def _number_cells() -> None:
    """Let nbval's kernels number the cells as Jupyter does: errors on ranks name them, and nbval stays at 1."""
    from nbval import kernel

    in_memory = ["--HistoryManager.hist_file=:memory:"]  # numbered cells go into the user's history otherwise
    kernel.start_new_kernel = functools.partial(kernel.start_new_kernel, extra_arguments=in_memory)

    def execute_cell_input(self: kernel.RunningKernel, source: str, allow_stdin: bool | None = None) -> str:
        return self.kc.execute(source, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)

    kernel.RunningKernel.execute_cell_input = execute_cell_input
