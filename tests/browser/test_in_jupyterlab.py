"""JupyterLab in a real browser: what appears while ranks run, what a saved notebook keeps, Interrupt and Restart."""

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import run_notebook
from lab import CHROMIUM, Lab, Notebook, browser_page, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set CHROMIUM to its path"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]
NAME = "06_train_mnist.ipynb"
SOON = 15.0  # seconds; 5 are promised, on a machine that is not busy with a browser
START = "%load_ext ddp_helpers\nfrom ddp_helpers import Ranks\nranks = Ranks(2)"
LOOP = """%%ranks
import time
from ddp_helpers import progress
for step in progress(range(3_000), "steps"):
    print("step", step)
    time.sleep(0.1)"""


@pytest.fixture
def lab(tmp_path) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks."""
    folder = tmp_path / "notebooks"
    shutil.copytree(run_notebook.NOTEBOOKS, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    with Lab(folder, tmp_path) as lab:
        yield lab


@pytest.fixture
def page(tmp_path):
    with browser_page(tmp_path) as page:
        yield page


def write(lab: Lab, name: str, *sources: str) -> str:
    """Write a notebook with these code cells beside the others and return its name."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nb = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": run_notebook.KERNELSPEC})
    nbformat.write(nb, lab.folder / name)
    return name


def outputs(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the outputs that say something: a finished bar leaves an empty one, which compares as nothing."""
    return [output for output in cell.get("outputs", []) if output.get("data") != {}]


def kinds(cell: nbformat.NotebookNode) -> list[str]:
    """Return the kind of each output."""
    return [output.get("name", output.output_type) for output in outputs(cell)]


def test_notebook_06_runs_live_and_saves_what_is_committed(lab, page, tmp_path):
    committed = run_notebook.read(run_notebook.NOTEBOOKS / NAME)
    training = next(i for i, cell in enumerate(committed.cells) if "Train Epoch: 1 " in str(cell.get("outputs")))
    notebook = Notebook(page, lab, NAME)
    notebook.menu("Edit", "Clear Outputs of All Cells")
    assert not any(cell["text"] for cell in notebook.cells())
    notebook.run_all()
    wait_for("the training cell", lambda: notebook.cells()[training]["prompt"] == "[*]:", 120)
    live, bars = "", []
    while (cell := notebook.cells()[training])["prompt"] == "[*]:":
        live = cell["text"] or live
        bars += re.findall(r"epochs [█░]{20} (\d+)/10", cell["text"])
        page.wait_for_timeout(50)
    assert "[rank 0] Train Epoch: 1 " in live
    assert len(set(bars)) >= 3 and bars == sorted(bars, key=int)

    notebook.wait_until_done(600)
    cells = notebook.cells()
    assert [cell["text"] for cell in cells if cell["errors"]] == []
    prompts = [cell["prompt"] for cell in cells if cell["code"]]
    assert prompts == [f"[{n}]:" for n in range(1, len(prompts) + 1)]

    notebook.save()
    saved = run_notebook.read(notebook.path)
    assert run_notebook.difference(committed, saved, run_notebook.read_rules()) is None
    assert [kinds(cell) for cell in saved.cells] == [kinds(cell) for cell in committed.cells]
    assert "█" not in str(saved.cells) and "░" not in str(saved.cells)

    pictures = Path(os.environ.get("DDP_SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    marks = {"load": "show.load(", "difference": "SideBySide("}
    shown = {name: next(i for i, c in enumerate(committed.cells) if mark in c.source) for name, mark in marks.items()}
    shown["training"] = training
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        for name, index in {"top": 0, **shown, "end": len(cells) - 1}.items():
            notebook.screenshot(pictures / f"{theme.lower()}-{name}.png", index)


def test_progress_leaves_nothing_in_a_saved_notebook(lab, page):
    work = "\nimport time\nfrom ddp_helpers import progress\nfor i in progress(range(8), 'work 🚀'): time.sleep(0.2)"
    function = "def f():" + work.replace("\n", "\n    ")
    sources = (
        "%%ranks" + work,
        "%%ranks" + work + "; print('step', i)",
        f"{function}\nprint('before')\nranks.run(f)\nprint('after')",
        f"from ddp_helpers import launch\n{function.replace('f()', 'g(rank)')}\nlaunch(g);",
    )
    notebook = Notebook(page, lab, write(lab, "progress.ipynb", START, *sources))
    notebook.run_all()
    for index in range(1, 1 + len(sources)):
        bar = r"work 🚀 [█░]{20} [1-7]/8"
        wait_for("a bar", lambda i=index, bar=bar: re.search(bar, notebook.cells()[i]["text"]), 60)
    notebook.wait_until_done(60)
    notebook.save()
    steps = "".join(f"[rank {rank}] step {i}\n" for rank in range(2) for i in range(8))
    saved = run_notebook.read(notebook.path)
    assert "█" not in str(saved.cells) and "░" not in str(saved.cells)
    _, silent, printing, function, launched = [[(o.name, o.text) for o in outputs(cell)] for cell in saved.cells]
    assert silent == launched == []
    assert printing == [("stdout", steps)]
    assert function == [("stdout", "before\n"), ("stdout", "after\n")]
    again = run_notebook.execute(saved, lab.folder)
    assert run_notebook.difference(saved, again, run_notebook.read_rules()) is None


def test_interrupt_and_restart(lab, page):
    check = "%%ranks\nprint('the variables are here:', step > 0)"
    silent = "%%ranks\nprint('ready')\nwhile True: time.sleep(0.1)"
    notebook = Notebook(page, lab, write(lab, "interrupt.ipynb", START, LOOP, check, silent))

    def shows(index: int, text: str) -> bool:
        return text in notebook.cells()[index]["text"]

    def idle(index: int) -> bool:
        return re.fullmatch(r"\[\d+\]:", notebook.cells()[index]["prompt"]) is not None

    notebook.run_cell(0)
    notebook.run_cell(1)
    wait_for("a line of rank 0", lambda: shows(1, "[rank 0] step 20\n"), 60)
    assert shows(1, "steps ░") and not idle(1)
    first = lab.ranks()
    assert len(first) == 2

    notebook.interrupt()
    wait_for("the end of the interrupted cell", lambda: idle(1), SOON)
    cell = notebook.cells()[1]
    assert cell["errors"] == 1 and cell["text"].count("KeyboardInterrupt:") == 1
    assert "[rank 1] step 0\n" in cell["text"] and "░" not in cell["text"]
    notebook.run_cell(2)
    wait_for("the next cell", lambda: idle(2), SOON)
    assert notebook.cells()[2]["text"] == "".join(f"[rank {r}] the variables are here: True\n" for r in range(2))
    assert lab.ranks() == first

    notebook.run_cell(3)
    wait_for("a line of rank 0", lambda: shows(3, "[rank 0] ready\n") and not idle(3), 60)
    notebook.restart()
    wait_for("the end of the ranks", lambda: not first & lab.ranks(), SOON)
    wait_for("the new kernel", lambda: notebook.status() == "idle", 60)
    assert lab.ranks() == set()
    notebook.run_cell(0)
    wait_for("the first cell", lambda: idle(0) and notebook.status() == "idle", 60)
    assert len(lab.ranks()) == 2
