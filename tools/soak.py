"""Run a notebook five times, two of them on a busy machine: `python tools/soak.py 06` (`make soak NB=06`).

Every compared text of every run must equal what is saved. Nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import run_notebook

RUNS = 5
LOADED = (3, 5)  # the runs that share the cores with busy processes
BUSY = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(1_000_000))"  # ends when this process does


@contextlib.contextmanager
def loaded_cores() -> Iterator[None]:
    """Keep every core busy with a process of its own."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def soak(name: str) -> int:
    """Run the notebook RUNS times, a line printed for each, then a verdict; returns how many runs differ."""
    path, rules = run_notebook.find(name), run_notebook.read_rules()
    saved, differing = run_notebook.read(path), 0
    for run in range(1, RUNS + 1):
        load = run in LOADED
        try:
            with loaded_cores() if load else contextlib.nullcontext():
                found = run_notebook.difference(saved, run_notebook.execute(saved, path.parent), rules)
        except run_notebook.RunError as error:
            found = f"did not reach the end, {str(error).strip().splitlines()[-1]}"
        differing += found is not None
        print(f"run {run} of {RUNS}{' (cores loaded)' if load else ''}: {found or 'identical'}", flush=True)
    verdict = f"{differing} of {RUNS} runs differ from" if differing else f"all {RUNS} runs equal"
    print(f"{path.name}: {verdict} what is saved")
    return differing


def main(argv: Sequence[str] | None = None) -> int:
    """Soak one notebook; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run a notebook five times and compare its outputs.")
    parser.add_argument("notebook", help="a number, such as 06, or the path of a notebook")
    options = parser.parse_args(argv)
    try:
        return 1 if soak(options.notebook) else 0
    except run_notebook.RunError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
