"""The comparison of outputs bites: one altered character is noticed, and outputs come from real runs only."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import run_notebook
import soak
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import IPyNbCell, IPyNbFile, coalesce_streams
from run_notebook import IGNORED, ROOT, compared_fields, notebooks, read_rules

POSITIONS = 9  # altered characters per output field
RULES = read_rules()
PNG = "iVBORw0KGgo="


# nbval's own comparator, on recorded outputs


def nbval_cells(path: Path, session: pytest.Session) -> list[IPyNbCell]:
    """Collect a notebook as nbval does, with the sanitizers and without starting a kernel."""
    file = IPyNbFile.from_parent(session, path=path)
    file.sanitize_patterns.update(RULES)
    return list(file.collect())


def same(cell: IPyNbCell, outputs: list[NotebookNode]) -> bool:
    """Let nbval compare outputs, as if the cell had just given them, with those recorded."""
    given, recorded = (coalesce_streams(copy.deepcopy(each)) for each in (outputs, cell.cell.outputs))
    return bool(cell.compare_outputs(given, recorded))


def free_positions(text: str) -> list[int]:
    """List the positions in a text that no sanitizer touches, at most POSITIONS, first and last included."""
    taken = {i for regex, _ in RULES for match in re.finditer(regex, text) for i in range(*match.span())}
    free = [i for i in range(len(text)) if i not in taken]
    if len(free) <= POSITIONS:
        return free
    return [free[i * (len(free) - 1) // (POSITIONS - 1)] for i in range(POSITIONS)]


def altered(text: str, position: int) -> str:
    """Return the text with another character at the position, a digit for a digit."""
    old = text[position]
    new = str((int(old) + 1) % 10) if old.isascii() and old.isdigit() else "#" if old != "#" else "*"
    return text[:position] + new + text[position + 1 :]


def alterations(outputs: list[NotebookNode]) -> Iterator[tuple[str, list[NotebookNode]]]:
    """Yield (what was done, outputs with one character altered), several for each compared field."""
    for i, output in enumerate(outputs):
        for field, (holder, key) in enumerate(compared_fields(output)):
            assert isinstance(holder[key], str), f"{key} is not text: print it, so that it can be checked"
            for position in free_positions(holder[key]):
                changed = copy.deepcopy(outputs)
                there, _ = list(compared_fields(changed[i]))[field]
                there[key] = altered(holder[key], position)
                yield f"output {i}, {key}, character {position}: {there[key]!r}", changed


def missed(path: Path, session: pytest.Session) -> tuple[int, list[str]]:
    """Return how many alterations nbval was shown, and those (or the unaltered outputs) that it got wrong."""
    shown, wrong = 0, []
    for cell in nbval_cells(path, session):
        if not cell.options["check"]:
            continue
        outputs = cell.cell.outputs
        if not same(cell, outputs):
            wrong.append(f"{cell.name}: differs from itself")
        for what, changed in alterations(outputs):
            shown += 1
            if same(cell, changed):
                wrong.append(f"{cell.name}: {what}")
        for i, output in enumerate(outputs):
            if list(compared_fields(output)) and same(cell, outputs[:i] + outputs[i + 1 :]):
                wrong.append(f"{cell.name}: output {i} missing")
    return shown, wrong


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.name)
def test_one_altered_character_is_noticed(path: Path, request: pytest.FixtureRequest) -> None:
    shown, wrong = missed(path, request.session)
    assert shown, f"{path.name} has no output that is compared"
    assert not wrong, "\n" + "\n".join(wrong)


def every_kind() -> NotebookNode:
    """Return a notebook with each kind of output, and one cell that is not compared."""
    result = {"text/plain": "3", "text/html": "<b>3</b>", "text/markdown": "*3*", "image/svg+xml": "<svg/>"}
    outputs = [
        new_output("stream", name="stdout", text="[rank 0] loss 0.31 in 0.2 s\n"),
        new_output("stream", name="stderr", text="warning"),
        new_output("execute_result", {**result, "image/png": PNG, "image/jpeg": PNG}, execution_count=1),
        new_output("display_data", {"text/plain": "<Figure size 640x480 with 1 Axes>", "image/png": PNG}),
        new_output("error", ename="ValueError", evalue="7 s", traceback=["line"]),
    ]
    ignored = [new_output("stream", name="stdout", text="0.123")]
    return new_notebook(
        cells=[
            new_code_cell("a", outputs=outputs, execution_count=1),
            new_markdown_cell("b"),
            new_code_cell("c", outputs=ignored, execution_count=2, metadata={"tags": [IGNORED]}),
        ]
    )


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """Write the notebook with every kind of output."""
    path = tmp_path / "kinds.ipynb"
    nbformat.write(every_kind(), path)
    return path


def test_every_kind_of_output_is_compared(kinds: Path, request: pytest.FixtureRequest) -> None:
    shown, wrong = missed(kinds, request.session)
    assert not wrong
    texts = [text for cell in every_kind().cells for _, text in run_notebook.compared_texts(cell)]
    assert shown == sum(len(free_positions(text)) for text in texts) > 50


def test_fields_are_those_that_nbval_compares(kinds: Path, request: pytest.FixtureRequest) -> None:
    cell = nbval_cells(kinds, request.session)[0]
    for i, output in enumerate(cell.cell.outputs):
        ours = {key for _, key in compared_fields(output)}
        for key in [key for key in (*output, *output.get("data", {})) if key not in ("data", "output_type", "name")]:
            changed = copy.deepcopy(cell.cell.outputs)
            holder = changed[i] if key in changed[i] else changed[i].data
            holder[key] = "other"
            assert same(cell, changed) == (key not in ours), key


def test_a_blind_comparator_is_noticed(
    kinds: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IPyNbCell, "compare_outputs", lambda *args: True)
    shown, wrong = missed(kinds, request.session)
    assert len(wrong) >= shown
    monkeypatch.setattr(IPyNbCell, "compare_outputs", lambda *args: False)
    assert missed(kinds, request.session)[1] == ["Cell 0: differs from itself"]


def test_altered_positions_avoid_the_sanitizers() -> None:
    text = "loss 0.31 in 0.25 s on port 43211\n"
    taken = set(range(text.index("0.25 s"), text.index(" on"))) | set(range(text.index("port"), len(text) - 1))
    assert not taken & set(free_positions(text))
    assert {0, len(text) - 1} <= set(free_positions(text))
    assert free_positions("0.25 s") == []
    assert [altered("a9#", i) for i in range(3)] == ["#9#", "a0#", "a9*"]


# Whole notebooks, under `pytest --nbval` with the settings of the root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project with the root's settings and no notebooks; return its notebook folder."""
    for name in ("conftest.py", "pyproject.toml", "tests/nbval_sanitize.cfg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def nbval_failures(folder: Path) -> dict[str, list[str]]:
    """Run pytest --nbval in a notebook folder; return file name -> names of the cells that failed."""
    report = folder.parent / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=folder, env=outside_pytest(), capture_output=True, text=True, timeout=900)
    assert report.is_file(), done.stdout + done.stderr
    found: dict[str, list[str]] = {path.name: [] for path in notebooks(folder)}
    for case in ET.parse(report).iter("testcase"):
        stem = case.get("classname", "").split(".")[1]
        found[f"{stem}.ipynb"] += [case.get("name", "")] if len(case) else []
    assert done.returncode == any(found.values()), done.stdout + done.stderr
    return found


def outside_pytest() -> dict[str, str]:
    """Return the environment without what pytest puts there."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


def small(*sources: str) -> NotebookNode:
    """Return a notebook that has not been run, with one code cell for each source."""
    nb = new_notebook(cells=[new_code_cell(source) for source in sources])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    return nb


def alter_last(path: Path, to: Path) -> str:
    """Copy a notebook with one character of its last compared output altered; return nbval's name of the cell."""
    nb = nbformat.read(path, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for number, cell in reversed(list(enumerate(code))):
        if IGNORED not in run_notebook.tags(cell):
            for _, changed in alterations(cell.outputs):
                cell.outputs = changed
                nbformat.write(nb, to)
                return f"Cell {number}"
    raise AssertionError(f"{path.name} has no output that is compared")


def test_an_altered_notebook_fails_and_a_good_one_passes(project: Path) -> None:
    timed = "import time\nstart = time.perf_counter()\nprint(f'took {time.perf_counter() - start:.9f} s')"
    counted = "ip = get_ipython()\nip.execution_count, ip.history_manager.hist_file"
    good = run_notebook.execute(small(timed, counted, "print('six')"), project)
    assert good.cells[1].outputs[0].data["text/plain"] == "(3, ':memory:')"
    good.metadata.kernelspec.name = "no-such-kernel"  # only the current environment's kernel can run it
    nbformat.write(good, project / "00_good.ipynb")
    assert alter_last(project / "00_good.ipynb", project / "01_bad.ipynb") == "Cell 2"
    assert nbval_failures(project) == {"00_good.ipynb": [], "01_bad.ipynb": ["Cell 2"]}


@pytest.mark.slow
def test_the_smallest_notebook_altered_fails_in_that_cell(project: Path) -> None:
    original = min(notebooks(), key=lambda path: path.stat().st_size)
    bad = alter_last(original, project / original.name)
    assert nbval_failures(project) == {original.name: [bad]}


def settings(config: pytest.Config, **given: object) -> SimpleNamespace:
    """Return nbval's options after the root's conftest has seen them; given ones as on a command line."""
    root = config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert root is not None
    option = SimpleNamespace(
        **{
            "nbval": True,
            "nbval_sanitize_with": None,
            "nbval_kernel_name": None,
            "nbval_current_env": False,
            "nbval_cell_timeout": 2000.0,
            **given,
        }
    )
    root.pytest_configure(SimpleNamespace(option=option, rootpath=ROOT))
    return option


def test_settings_of_the_root(pytestconfig: pytest.Config) -> None:
    option = settings(pytestconfig)
    assert Path(option.nbval_sanitize_with) == run_notebook.SANITIZERS
    assert option.nbval_current_env
    assert option.nbval_cell_timeout == run_notebook.CELL_DEADLINE == 300
    assert set(vars(option)) <= set(vars(pytestconfig.option)), "nbval has renamed an option"
    mine = {"nbval_sanitize_with": "mine.cfg", "nbval_kernel_name": "mine", "nbval_cell_timeout": 5.0}
    asked = settings(pytestconfig, **mine)
    assert mine.items() <= vars(asked).items()
    assert not asked.nbval_current_env
    without = settings(pytestconfig, nbval=False)
    assert without.nbval_sanitize_with is None
    assert (without.nbval_current_env, without.nbval_cell_timeout) == (False, 2000)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests", Path("/")], ids=["root", "tests", "outside"])
def test_settings_hold_in_any_folder(folder: Path) -> None:
    """Ask a real pytest, started in the folder, what the options are."""
    plugin = "import json\ndef pytest_collection_finish(session):\n    o = session.config.option\n"
    plugin += "    print('OPTIONS', json.dumps([o.nbval_sanitize_with, o.nbval_current_env, o.nbval_cell_timeout]))\n"
    code = f"import sys, types, pytest\np = types.ModuleType('p')\nexec({plugin!r}, p.__dict__)\n"
    code += f"pytest.main(['--nbval', '--collect-only', '-qs', {str(Path(__file__))!r}], plugins=[p])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=outside_pytest(), capture_output=True, text=True)
    line = next(line for line in done.stdout.split("\n") if line.startswith("OPTIONS"))
    assert json.loads(line.removeprefix("OPTIONS")) == [str(run_notebook.SANITIZERS), True, 300.0]


# tools/run_notebook.py and tools/soak.py


def test_run_writes_outputs_and_minimal_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_MNIST", "full")
    other = tmp_path / "kernels" / "python3" / "kernel.json"  # another environment's kernel of the same name
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"argv": ["false"], "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    nb = small(
        "import os, sys\nprint('a', flush=True)\nprint('b', file=sys.stderr, flush=True)\nprint('c')",
        "os.environ.get('DDP_MNIST'), os.path.basename(os.getcwd()), sys.executable == '" + sys.executable + "'",
        f"exec(compile('1/0', '{ROOT}/a.py', 'exec'))",
        "x = 2\nx",
    )
    nb.cells[2].metadata = {"tags": ["raises-exception"], "collapsed": True}
    nb.cells[3].outputs, nb.cells[3].execution_count = [new_output("stream", name="stdout", text="old")], 41
    nb.metadata.language_info = {"name": "python", "version": "2.7"}
    ids = [cell.id for cell in nb.cells]
    path = tmp_path / "07_small.ipynb"
    nbformat.write(nb, path)
    assert run_notebook.main([str(path)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "kernels"]
    made = json.loads(path.read_text(encoding="utf-8"))
    assert made["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell["execution_count"] for cell in made["cells"]] == [1, 2, 3, 4]
    assert [cell["id"] for cell in made["cells"]] == ids
    assert [cell["metadata"] for cell in made["cells"]] == [{}, {}, {"tags": ["raises-exception"]}, {}]
    streams, where, error, last = (cell["outputs"] for cell in made["cells"])
    assert [(output["name"], "".join(output["text"])) for output in streams] == [
        ("stdout", "a\nc\n"),
        ("stderr", "b\n"),
    ]
    assert "".join(where[0]["data"]["text/plain"]) == f"(None, '{tmp_path.name}', True)"
    assert error[0]["ename"] == "ZeroDivisionError"
    assert str(ROOT) not in json.dumps(error) and "a.py" in json.dumps(error)
    assert last == [
        {"data": {"text/plain": ["2"]}, "execution_count": 4, "metadata": {}, "output_type": "execute_result"}
    ]

    before = path.read_bytes()
    assert run_notebook.main([str(path), "--check"]) == 0
    assert "identical" in capsys.readouterr().out
    path.write_bytes(before.replace(b'"a\\n"', b'"z\\n"'))
    wrong = path.read_bytes()
    assert wrong != before
    assert run_notebook.main([str(path), "--check"]) == 1
    assert "cell 0, stdout line 1: saved 'z', now 'a'" in capsys.readouterr().out
    assert path.read_bytes() == wrong


def test_run_that_fails_leaves_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "07_small.ipynb"
    nbformat.write(small("print(1)", "raise ValueError('the cause')"), path)
    before = path.read_bytes()
    assert run_notebook.main([str(path)]) == 1
    assert "the cause" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_write_replaces_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "07_small.ipynb"
    path.write_text("old")
    invalid = small("1")
    invalid.cells[0].pop("source")
    with pytest.raises(nbformat.ValidationError):
        run_notebook.write(invalid, path)
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        run_notebook.write(small("1"), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_find_takes_a_number_or_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("06_a.ipynb", "07_b.ipynb", "07_c.ipynb"):
        (tmp_path / name).touch()
    assert run_notebook.find("06", tmp_path) == tmp_path / "06_a.ipynb"
    assert run_notebook.find(str(tmp_path / "07_c.ipynb")) == tmp_path / "07_c.ipynb"
    for name in ("0", "07", "08", "06_a.ipynb/x.ipynb"):
        with pytest.raises(run_notebook.RunError, match="exactly one"):
            run_notebook.find(name, tmp_path)
    assert run_notebook.main(["no_such"]) == soak.main(["no_such"]) == 1
    assert capsys.readouterr().err.count("exactly one") == 2


def test_difference_describes_the_first_one() -> None:
    def run(text: str, *more: NotebookNode, **kwargs: Any) -> NotebookNode:
        outputs = [new_output("stream", name="stdout", text=text), *more]
        return new_notebook(cells=[new_markdown_cell("a"), new_code_cell("b", outputs=outputs, **kwargs)])

    def found(one: NotebookNode, two: NotebookNode) -> str | None:
        return run_notebook.difference(one, two, RULES)

    png = new_output("display_data", {"image/png": "a"})
    assert found(run("1\n2\n"), run("1\n2\n")) is None
    assert found(run("took 1.0 s"), run("took 2.0 s")) is None
    assert found(run("1", png), run("1", new_output("display_data", {"image/png": "b"}))) is None
    assert found(run("1\n2\n"), run("1\n3\n")) == "cell 1, stdout line 2: saved '2', now '3'"
    assert found(run("1"), run("1\n3")) == "cell 1, stdout line 2: saved nothing, now '3'"
    assert found(run("1\n3"), run("1")) == "cell 1, stdout line 2: saved '3', now nothing"
    error = new_output("error", ename="A", evalue="b")
    assert found(run("1"), run("1", error)) == "cell 1: 1 output texts are saved, the run gave 3"
    swapped = run("1")
    swapped.cells[1].outputs[0].name = "stderr"
    assert found(run("1"), swapped) == "cell 1: stdout is saved where the run gave stderr"
    ignored = {"metadata": {"tags": [IGNORED]}}
    assert found(run("1", **ignored), run("2", **ignored)) is None


@pytest.mark.parametrize(
    ("differs", "fails", "line"),
    [
        (0, 0, "run 5 of 5 (cores loaded): identical"),
        (2, 0, "run 2 of 5: cell 0, stdout line 1: saved '1', now '2'"),
        (0, 3, "run 3 of 5 (cores loaded): did not reach the end, the cause"),
    ],
)
def test_soak_counts_the_runs_that_differ(
    differs: int,
    fails: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "07_small.ipynb"
    saved = small("1")
    saved.cells[0].outputs = [new_output("stream", name="stdout", text="1")]
    nbformat.write(saved, path)
    busy: set[object] = set()
    loads: list[int] = []  # busy processes during each run

    class Process:
        def __init__(self, command: list[str]) -> None:
            busy.add(self)

        def kill(self) -> None:
            self.killed = True

        def wait(self) -> None:
            assert self.killed
            busy.remove(self)

    def execute(nb: NotebookNode, folder: Path) -> NotebookNode:
        loads.append(len(busy))
        fresh = copy.deepcopy(nb)
        if len(loads) == differs:
            fresh.cells[0].outputs[0].text = "2"
        if len(loads) == fails:
            raise run_notebook.RunError("a traceback\nthe cause\n")
        return fresh

    monkeypatch.setattr(run_notebook, "execute", execute)
    monkeypatch.setattr(subprocess, "Popen", Process)
    good = not differs and not fails
    assert soak.main([str(path)]) == (0 if good else 1)
    assert loads == [0, 0, os.cpu_count(), 0, os.cpu_count()]
    assert not busy
    printed = capsys.readouterr().out
    assert line in printed
    assert printed.count("identical") == (5 if good else 4)
    assert ("all 5 runs equal" in printed) == good


def test_busy_processes_end_with_their_parent() -> None:
    code = "import soak, subprocess, sys\n"
    code += "p = subprocess.Popen([sys.executable, '-c', soak.BUSY], stdout=sys.stdout)\nprint('up', flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True, timeout=60
    )  # returns only when the orphan has closed its end of the pipe
    assert done.stdout == "up\n"
