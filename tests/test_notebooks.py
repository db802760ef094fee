"""Every notebook is run, complete and clean; every rule that says so is shown a notebook that breaks it."""

from __future__ import annotations

import ast
import base64
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from run_notebook import IGNORED, KERNELSPEC, LANGUAGE_INFO, NOTEBOOKS, ROOT, notebooks, tags

PARTS = ("You will do", "You will learn", "You need", "Runs on")
CLOSING = ("In one piece", "Exercises", "Recap", "In practice", "Next", "Further reading")
TAGS = ("raises-exception", IGNORED)
MAX_LINES, MAX_LINES_WHOLE = 25, 60
MAX_IGNORED, MAX_PNG = 3, 100_000  # cells, bytes

FORBIDDEN_CODE = {
    "torch.distributed.launch": "use torchrun",
    "all_gather_into_tensor": "use the list form of all_gather: this name warns in newer torch",
    "reduce_scatter_tensor": "use the list form of reduce_scatter: this name warns in newer torch",
}
UNSTABLE = {
    r"\d\.\d{5,}": "a float with 5 or more decimals: round it",
    r"\b0x[0-9a-fA-F]{6,}": "an object address: print what the object is",
    r"(?:127\.0\.0\.1|localhost)\]?:\d|(?:\b[Pp]ort|MASTER_PORT)[ =:]+\d{4,5}\b": "a port: leave it out",
    r"\b(?:pid|PID)[ =:]+\d": "a pid: leave it out",
    r"(?<![\w.])/(?:tmp|home|root|Users)/|" + re.escape(str(ROOT)): "a path of one machine: print the name only",
    r"\r|\x08|\x1b\[|\d%\|": "a carriage return, ANSI code or progress bar: use progress(), or print lines",
}

Rule = Callable[[NotebookNode, Path], Iterator[str]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a function to the rules that every notebook is held to."""
    RULES.append(function)
    return function


def problems(nb: NotebookNode, folder: Path = NOTEBOOKS) -> list[str]:
    """Say what to change in a notebook of the series that lies in folder; cells are counted from 0."""
    return [problem for check in RULES for problem in check(nb, folder)]


# Parts of a notebook


def cells(nb: NotebookNode, kind: str) -> list[tuple[int, NotebookNode]]:
    """List (index, cell) of one kind."""
    return [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == kind]


def without_code(source: str) -> str:
    """Return Markdown with its code blocks and code spans taken out."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.DOTALL | re.MULTILINE))


def headings(source: str) -> list[tuple[int, str]]:
    """List (level, text) of the headings in Markdown."""
    lines = re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.DOTALL | re.MULTILINE).split("\n")
    return [(len(m[1]), m[2].strip()) for line in lines if (m := re.match(r"(#{1,6}) +(.+)", line))]


def sections(nb: NotebookNode) -> list[tuple[str, str, list[NotebookNode]]]:
    """List (title, prose, code cells) of the ## sections."""
    found: list[tuple[str, str, list[NotebookNode]]] = []
    for cell in nb.cells:
        if cell.cell_type == "code":
            if found:
                found[-1][2].append(cell)
            continue
        before, *parts = re.split(r"^## +", without_code(cell.source), flags=re.MULTILINE)
        if found and before.strip():
            title, prose, code = found[-1]
            found[-1] = title, f"{prose}\n{before}", code
        for part in parts:
            title, _, prose = part.partition("\n")
            found.append((title.strip(), prose, []))
    return found


def section(nb: NotebookNode, title: str) -> tuple[str, list[NotebookNode]]:
    """Return (prose, code cells) of a section, both empty where it is missing."""
    return next(((prose, code) for name, prose, code in sections(nb) if name == title), ("", []))


def items(prose: str) -> list[str]:
    """List the items of the top-level lists in Markdown, continuation lines included."""
    return [
        " ".join(item.split()) for item in re.findall(r"^(?:[-*+]|\d+\.) +((?:.+\n?)(?:[ \t]+.+\n?)*)", prose, re.M)
    ]


def opening(nb: NotebookNode) -> dict[str, str]:
    """Return the text of each part of cell 0, in the order found."""
    names = "|".join(PARTS)
    source = nb.cells[0].source if nb.cells else ""
    pieces = re.split(rf"^\*{{1,2}}({names})[.:]?\*{{1,2}}[.:]?", source, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], (text.strip() for text in pieces[2::2]), strict=True))


def calls(nb: NotebookNode) -> set[str]:
    """Return the names of the functions that the notebook, not the ranks, calls."""
    found = set()
    for _, cell in cells(nb, "code"):
        if cell.source.lstrip().startswith("%%"):
            continue
        lines = [line for line in cell.source.split("\n") if not line.lstrip().startswith(("%", "!"))]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
    return found


def links(source: str) -> list[tuple[bool, str, str]]:
    """List (is an image, text, target) of the links and images in Markdown."""
    text = without_code(source)
    found = [(bool(m[1]), m[2], m[3]) for m in re.finditer(r"(!?)\[([^\]]*)\]\(\s*<?([^)\s>]*)[^)]*\)", text)]
    for tag in re.findall(r"<img\b[^>]*>", text):
        alt, src = (re.search(rf"\b{name}=[\"']([^\"']*)", tag) for name in ("alt", "src"))
        found.append((True, alt[1] if alt else "", src[1] if src else ""))
    return found


# Rules


@rule
def valid(nb: NotebookNode, folder: Path) -> Iterator[str]:
    ids = [cell.get("id") for cell in nb.cells]
    if (nb.nbformat, nb.nbformat_minor) < (4, 5) or None in ids or len(set(ids)) < len(ids):
        yield "every cell needs an id of its own (nbformat 4.5): write the notebook with `make run`"
        return
    try:
        nbformat.validate(copy.deepcopy(nb))
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error.message}"


@rule
def minimal_metadata(nb: NotebookNode, folder: Path) -> Iterator[str]:
    if nb.metadata != {"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO}:
        yield "the notebook's metadata says more than its kernel: write it with `make run`"
    for i, cell in enumerate(nb.cells):
        if set(cell.metadata) - {"tags"}:
            yield f"cell {i}: metadata other than tags: write the notebook with `make run`"
        for tag in tags(cell):
            if tag not in TAGS:
                yield f"cell {i}: tag {tag!r} is none of {', '.join(TAGS)}: remove it"


@rule
def run_in_order(nb: NotebookNode, folder: Path) -> Iterator[str]:
    counts = [cell.execution_count for _, cell in cells(nb, "code")]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}: write the outputs with `make run`"


@rule
def title(nb: NotebookNode, folder: Path) -> Iterator[str]:
    found = [(i, text) for i, cell in cells(nb, "markdown") for level, text in headings(cell.source) if level == 1]
    if len(found) != 1 or not nb.cells[0].source.startswith("# "):
        yield f"cell 0 must begin with the one '# ' title of the notebook; found {found}"
        return
    first, *rest = found[0][1].split()
    capitals = [word for word in rest if re.fullmatch(r"[A-Z][a-z]+", word)]
    if not first[0].isupper() or len(capitals) > 1 or found[0][1].endswith("."):
        yield f"title {found[0][1]!r}: sentence case, a capital first and no full stop"


@rule
def opening_parts(nb: NotebookNode, folder: Path) -> Iterator[str]:
    parts = opening(nb)
    if tuple(parts) != PARTS:
        yield f"cell 0 has the parts {list(parts)}; it needs {list(PARTS)} in italics, in this order"
    yield from (f"cell 0: *{name}* says nothing" for name, text in parts.items() if not text)
    learn = len(items(parts.get("You will learn", "")))
    if not 3 <= learn <= 5:
        yield f"cell 0: *You will learn* lists {learn} items; list 3 to 5 actions"


@rule
def first_code(nb: NotebookNode, folder: Path) -> Iterator[str]:
    source = nb.cells[1].source if len(nb.cells) > 1 and nb.cells[1].cell_type == "code" else ""
    if not re.search(r"^%load_ext ddp_helpers$", source, re.MULTILINE) or "Ranks(" not in source:
        yield "cell 1 must be code with '%load_ext ddp_helpers' and 'ranks = Ranks(2)'"


@rule
def section_order(nb: NotebookNode, folder: Path) -> Iterator[str]:
    exercises = (folder.parent / "ddp_helpers" / "checks.py").is_file()
    expected = [name for name in CLOSING if exercises or name != "Exercises"]
    names = [name for name, _, _ in sections(nb)]
    start = next((i for i, name in enumerate(names) if name in CLOSING), len(names))
    if names[start:] != expected:
        yield f"the last ## headings are {names[start:]}; they must be {expected}, in this order"
    if not exercises and "Exercises" in names:
        yield "## Exercises needs the checkers of ddp_helpers/checks.py: leave it out until that file exists"
    if not 4 <= start <= 8:
        yield f"the body has {start} ## sections; have one for each thing to learn, 4 to 8"
    for name, prose, code in sections(nb):
        if not prose.strip() and not code:
            yield f"## {name}: the section is empty"


@rule
def in_one_piece(nb: NotebookNode, folder: Path) -> Iterator[str]:
    code = "\n".join(cell.source for cell in section(nb, "In one piece")[1])
    for text, why in (
        ("def main(", "the main result is one function main(rank, …)"),
        ("launch(", "main is run by launch"),
        ("assert ", "its result is asserted equal to the live one"),
    ):
        if text not in code:
            yield f"## In one piece has no {text!r}: {why}"


@rule
def recap_mirrors_learning(nb: NotebookNode, folder: Path) -> Iterator[str]:
    learn, recap = len(items(opening(nb).get("You will learn", ""))), len(items(section(nb, "Recap")[0]))
    if learn != recap:
        yield f"## Recap lists {recap} items for the {learn} of *You will learn*: mirror them one to one"


@rule
def further_reading(nb: NotebookNode, folder: Path) -> Iterator[str]:
    found = items(section(nb, "Further reading")[0])
    if not found:
        yield "## Further reading lists nothing: give at least one described link"
    for item in found:
        description = re.sub(r"\[[^\]]*\]\([^)]*\)|<?https?://\S+", "", item)
        if "](" not in item or len(re.findall(r"\w+", description)) < 4:
            yield f"## Further reading: {item[:60]!r} is a bare link; say what the reader finds there"


@rule
def live_ranks_and_launch(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for name in ("Ranks", "launch"):
        if name not in calls(nb):
            yield f"no cell calls {name}(…): the notebook must step on live ranks and end in a launch"


@rule
def prose_between(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, _ in cells(nb, "code"):
        above = nb.cells[i - 1].source if i and nb.cells[i - 1].cell_type == "markdown" else ""
        if not re.search(r"^(?!#).*\w", above, re.MULTILINE):
            yield f"cell {i}: no prose above this code; say what to look for, or join the two cells"


@rule
def cell_length(nb: NotebookNode, folder: Path) -> Iterator[str]:
    whole = [cell.get("id") for cell in section(nb, "In one piece")[1]]
    for i, cell in cells(nb, "code"):
        lines, limit = len(cell.source.split("\n")), MAX_LINES_WHOLE if cell.get("id") in whole else MAX_LINES
        if lines > limit:
            yield f"cell {i}: {lines} lines of code, at most {limit}: split it"
        if not cell.source.strip():
            yield f"cell {i}: empty: remove it"


@rule
def errors_and_stderr(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, cell in cells(nb, "code"):
        failed = any(output.output_type == "error" for output in cell.outputs)
        if failed and "raises-exception" not in tags(cell):
            yield f"cell {i}: a saved error: repair the cell, or tag it raises-exception and say so above it"
        if "raises-exception" in tags(cell) and not failed:
            yield f"cell {i}: tagged raises-exception but it did not fail: remove the tag, or make it fail"
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"cell {i}: output on stderr: remove what caused the warning"


@rule
def ignored_cells(nb: NotebookNode, folder: Path) -> Iterator[str]:
    ignored = [i for i, cell in cells(nb, "code") if IGNORED in tags(cell)]
    if len(ignored) > MAX_IGNORED:
        yield f"{len(ignored)} cells are tagged {IGNORED}, at most {MAX_IGNORED}: print a verdict instead"
    for i in ignored:
        above = next((c.source for c in reversed(nb.cells[:i]) if c.cell_type == "markdown"), "")
        if not re.search(r"\bcompared\b", without_code(above)):
            yield f"cell {i}: the prose above must say why its output is not compared"
    for i, cell in cells(nb, "code"):
        if re.search(r"#\s*(?:NBVAL|PYTEST_VALIDATE)_", cell.source):
            yield f"cell {i}: a comment that steers nbval: use a tag, so that it is counted"


@rule
def stable_outputs(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, cell in cells(nb, "code"):
        for output in cell.outputs if IGNORED not in tags(cell) else []:
            texts = list(output.get("data", {}).values()) + [output.get(key, "") for key in ("text", "evalue")]
            for pattern, what in UNSTABLE.items():
                match = next((m for text in texts if isinstance(text, str) and (m := re.search(pattern, text))), None)
                if match:
                    yield f"cell {i}: the output holds {match[0]!r}, {what}"


@rule
def pictures(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, cell in cells(nb, "code"):
        drawn = [(k, v) for output in cell.outputs for k, v in output.get("data", {}).items() if k.startswith("image/")]
        for kind, content in drawn:
            if kind != "image/png":
                yield f"cell {i}: {kind} output: draw PNG"
            elif len(base64.b64decode(content)) > MAX_PNG:
                yield f"cell {i}: a PNG of over {MAX_PNG // 1000} kB: draw less, or at a lower resolution"
        if drawn and not re.search(r"^\s*assert\b|\bprint\(", cell.source, re.MULTILINE):
            yield f"cell {i}: a picture is not compared: print or assert what it shows in the same cell"


@rule
def links_and_images(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, cell in cells(nb, "markdown"):
        for is_image, text, target in links(cell.source):
            if is_image and not text.strip():
                yield f"cell {i}: image {target!r} has no alt text: describe it for those who can't see it"
            if re.match(r"https?://|mailto:|#", target) and not is_image:
                continue
            if not target or target.startswith("/") or not (folder / target.partition("#")[0]).is_file():
                yield f"cell {i}: {target!r} is not a file beside the notebook: correct the link"


@rule
def words(nb: NotebookNode, folder: Path) -> Iterator[str]:
    for i, cell in cells(nb, "markdown"):
        if re.search(r"\bsimply\b", without_code(cell.source), re.IGNORECASE):
            yield f"cell {i}: 'simply' in the prose: what is simple for one reader is not for another"
    for i, cell in cells(nb, "code"):
        for name, instead in FORBIDDEN_CODE.items():
            if name in cell.source:
                yield f"cell {i}: {name}: {instead}"


@rule
def same_code_as_helpers(nb: NotebookNode, folder: Path) -> Iterator[str]:
    helpers = helper_code()
    for i, cell in cells(nb, "code"):
        for name, code in definitions(cell.source):
            if name != "main" and name in helpers and code not in helpers[name]:
                yield f"cell {i}: {name} is not the {name} of ddp_helpers: show the same code, or use another name"


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, code) of the functions and classes in a cell or module; docstrings and annotations left out."""
    try:
        tree = ast.parse(re.sub(r"^[%!].*", "", source, flags=re.MULTILINE))
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                    if ast.get_docstring(inner) is not None and len(inner.body) > 1:
                        del inner.body[0]
                    if isinstance(inner, ast.FunctionDef):
                        inner.returns = None
                if isinstance(inner, ast.arg):
                    inner.annotation = None
            yield node.name, ast.unparse(node)


@functools.cache
def helper_code() -> dict[str, list[str]]:
    """Return the code of each function and class of ddp_helpers, by name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "ddp_helpers").rglob("*.py")):
        for name, code in definitions(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(code)
    return found


# The series


def read(path: Path) -> NotebookNode:
    """Read a notebook as it is on disk, without the repairs that nbformat.read makes."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def readme_problems(readme: str, names: list[str]) -> list[str]:
    """Compare the links in the README's tables with the names of the notebooks on disk."""
    rows = [line for line in readme.split("\n") if line.lstrip().startswith("|")]
    linked = re.findall(r"\]\(notebooks/([^)]+\.ipynb)\)", "\n".join(rows))
    return [] if linked == names else [f"README.md: the table links {linked}; on disk, in order: {names}"]


def stray_notebooks(root: Path) -> list[str]:
    """List notebooks that `pytest --nbval` would run although they are not of the series."""
    found = [path.relative_to(root) for top in ("tests", "notebooks") for path in (root / top).rglob("*.ipynb")]
    return sorted(
        str(path)
        for path in found
        if not any(part.startswith(".") for part in path.parts)
        and not (path.parent == Path("notebooks") and re.fullmatch(r"\d\d(_[a-z0-9]+)+\.ipynb", path.name))
    )


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.name)
def test_notebook_is_clean(path: Path) -> None:
    found = problems(read(path), path.parent)
    assert not found, "\n" + "\n".join(found)


def test_there_are_notebooks() -> None:
    assert notebooks()


def test_readme_lists_the_notebooks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_problems(readme, [path.name for path in notebooks()]) == []


def test_only_the_series_is_collected() -> None:
    assert stray_notebooks(ROOT) == []


# The rules themselves: a good notebook, and one broken notebook for each thing that a rule looks at

OPENING = """# Count the ranks of MNIST

*You will do.* Count two ranks.

*You will learn*

- count,
- sum, over
  two lines,
- stop.

*You need.* Python (necessary).

*Runs on.* 2 ranks, gloo, 1 s."""

CLOSE = """## Recap

* counted
* summed
* stopped

## In practice

Clusters count more, and `simply` is code.

## Next

[The next one](02_next.ipynb#top)

## Further reading

- [The manual](https://example.org/a) lists every collective with its cost."""

PNG = base64.b64encode(b"\x89PNG" + bytes(1000)).decode()


def good() -> NotebookNode:
    """Return a small notebook that breaks no rule."""
    fail = new_output("error", ename="ValueError", evalue="no", traceback=["\x1b[31mValueError\x1b[0m: /tmp/x"])
    picture = new_output("display_data", {"image/png": PNG, "text/plain": "<Figure size 640x480 with 1 Axes>"})
    both = [
        "%load_ext ddp_helpers\nfrom ddp_helpers import Ranks, launch\nranks = Ranks(2)",
        "x = 1\nprint(x)",
    ]
    cells = [
        new_markdown_cell(OPENING),
        new_code_cell(both[0]),
        new_markdown_cell("## First\n\nWhat is x?\n\n```python\n# not a title\n## Nor a section\n```"),
        new_code_cell(both[1], outputs=[new_output("stream", name="stdout", text="1\n")]),
        new_markdown_cell("## Second\n\nIt fails. ![Two ranks](figures/ranks.png)"),
        new_code_cell("raise ValueError('no')", metadata={"tags": ["raises-exception"]}, outputs=[fail]),
        new_markdown_cell("## Third\n\nTimes differ, so they are not compared."),
        new_code_cell(
            "print(0.123456)",
            metadata={"tags": [IGNORED]},
            outputs=[new_output("stream", name="stdout", text="0.123456\n")],
        ),
        new_markdown_cell("## Fourth\n\nA picture."),
        new_code_cell("draw()\nassert x == 1", outputs=[picture]),
        new_markdown_cell("## In one piece\n\nAll of it."),
        new_code_cell(
            "def main(rank):\n    return rank\n\n\nassert launch(main) == [0, 1]" + "\n# long" * 40,
        ),
        new_markdown_cell(CLOSE),
    ]
    metadata = {"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO}
    nb = new_notebook(cells=cells, metadata=copy.deepcopy(metadata))
    for count, (_, cell) in enumerate(list_code(nb), 1):
        cell.execution_count = count
    return nb


def list_code(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """List the code cells of the good notebook."""
    return cells(nb, "code")


def swap(index: int, old: str, new: str) -> Callable[[NotebookNode], None]:
    """Return a change that replaces text in the source of a cell; fails if the text is not there."""

    def change(nb: NotebookNode) -> None:
        assert old in nb.cells[index].source
        nb.cells[index].source = nb.cells[index].source.replace(old, new)

    return change


def prints(text: str) -> Callable[[NotebookNode], None]:
    """Return a change that makes the compared cell 3 print text."""
    return lambda nb: nb.cells[3].outputs[0].update(text=text)


def tag(index: int, *names: str) -> Callable[[NotebookNode], None]:
    """Return a change that gives a cell these tags and no others."""
    return lambda nb: nb.cells[index].metadata.update(tags=list(names))


def output(index: int, *args: object, **kwargs: object) -> Callable[[NotebookNode], None]:
    """Return a change that adds an output to a cell."""
    return lambda nb: nb.cells[index].outputs.append(new_output(*args, **kwargs))


AT_LIMIT, BIG = (base64.b64encode(bytes(size)).decode() for size in (MAX_PNG, MAX_PNG + 1))

BROKEN: dict[str, tuple[Callable[[NotebookNode], object], str]] = {
    "no ids": (lambda nb: nb.cells[2].pop("id"), "needs an id"),
    "equal ids": (lambda nb: nb.cells[2].update(id=nb.cells[3].id), "needs an id"),
    "old format": (lambda nb: nb.update(nbformat_minor=4), "needs an id"),
    "invalid": (lambda nb: nb.cells[3].outputs[0].pop("name"), "not a valid notebook"),
    "python version": (lambda nb: nb.metadata.language_info.update(version="3.11"), "notebook's metadata"),
    "other kernel": (lambda nb: nb.metadata.kernelspec.update(name="venv"), "notebook's metadata"),
    "timing": (lambda nb: nb.cells[3].metadata.update(execution={}), "metadata other than tags"),
    "unknown tag": (tag(3, "nbval-skip"), "tag 'nbval-skip' is none of"),
    "not run": (lambda nb: nb.cells[3].update(execution_count=None), "execution counts"),
    "run twice": (lambda nb: nb.cells[11].update(execution_count=9), "execution counts"),
    "no title": (swap(0, "# Count", "Count"), "one '# ' title"),
    "two titles": (swap(4, "## Second", "# Second"), "one '# ' title"),
    "late title": (swap(0, "# Count", "First.\n\n# Count"), "one '# ' title"),
    "lower-case title": (swap(0, "# Count", "# count"), "sentence case"),
    "title case": (swap(0, "the ranks of", "The Ranks Of"), "sentence case"),
    "title with a full stop": (swap(0, "MNIST", "MNIST."), "sentence case"),
    "part missing": (swap(0, "*You need.*", "Needed:"), "cell 0 has the parts"),
    "parts in another order": (swap(0, "*You need.* Python", "*Runs on.* x\n\n*You need.* P"), "cell 0 has"),
    "empty part": (swap(0, " Python (necessary).", ""), "*You need* says nothing"),
    "two things to learn": (swap(0, "- stop.\n", ""), "lists 2 items"),
    "six things to learn": (swap(0, "- stop.\n", "- a\n- b\n- c\n- d\n"), "lists 6 items"),
    "no extension": (swap(1, "%load_ext ddp_helpers\n", ""), "cell 1 must be code"),
    "extension in a comment": (swap(1, "%load_ext", "# %load_ext"), "cell 1 must be code"),
    "ranks start later": (swap(1, "Ranks(2)", "None"), "cell 1 must be code"),
    "prose before the first code": (
        lambda nb: nb.cells.insert(1, new_markdown_cell("Hi.")),
        "cell 1 must be",
    ),
    "three sections": (swap(4, "## Second", "Second"), "the body has 3"),
    "nine sections": (swap(4, "It fails.", "a\n" + "## B\n\nb\n" * 5), "the body has 9"),
    "empty section": (swap(8, "## Fourth", "## Nothing\n\n## Fourth"), "## Nothing: the section is empty"),
    "closing out of order": (swap(12, "## Next", "## Later"), "last ## headings"),
    "closing twice": (swap(12, "## Further", "## Next\n\nx\n\n## Further"), "last ## headings"),
    "closing missing": (swap(10, "## In one piece", "All"), "last ## headings"),
    "body after the closing": (swap(12, "## Further", "## More\n\nx\n\n## Further"), "last ## headings"),
    "exercises too early": (swap(12, "## Recap", "## Exercises\n\nTwo.\n\n## Recap"), "## Exercises needs"),
    "no main": (swap(11, "def main(rank)", "def work(rank)"), "no 'def main('"),
    "no launch in one piece": (swap(11, "launch(main)", "[0, 1]"), "no 'launch('"),
    "no assert in one piece": (swap(11, "assert ", ""), "no 'assert '"),
    "short recap": (swap(12, "* stopped\n", ""), "## Recap lists 2 items for the 3"),
    "bare link": (swap(12, " lists every collective with its cost.", ": docs"), "is a bare link"),
    "no link": (swap(12, "[The manual](https://example.org/a)", "The manual"), "is a bare link"),
    "nothing to read": (swap(12, "- [The manual]", "[The manual]"), "Further reading lists nothing"),
    "ranks only named": (swap(1, "Ranks(2)", "None  # Ranks(2)"), "no cell calls Ranks("),
    "launch only on the ranks": (swap(11, "def main", "%%ranks\ndef main"), "no cell calls launch("),
    "code after code": (lambda nb: nb.cells.pop(4), "cell 4: no prose above"),
    "only a heading between": (swap(8, "\n\nA picture.", ""), "cell 9: no prose above"),
    "raw cell between": (lambda nb: nb.cells[4].update(cell_type="raw"), "cell 5: no prose above"),
    "long cell": (swap(3, "x = 1\n", "x = 1\n" * 25), "cell 3: 26 lines of code, at most 25"),
    "very long last cell": (swap(11, "assert", "\n" * 16 + "assert"), "61 lines of code, at most 60"),
    "empty cell": (lambda nb: nb.cells[3].update(source="\n"), "cell 3: empty"),
    "saved error": (tag(5), "cell 5: a saved error"),
    "no error": (lambda nb: nb.cells[5].update(outputs=[]), "did not fail"),
    "stderr": (output(3, "stream", name="stderr", text="warning\n"), "output on stderr"),
    "four ignored cells": (lambda nb: [tag(i, IGNORED)(nb) for i in (1, 3, 9)], "4 cells are tagged"),
    "no reason": (swap(6, "compared", "`compared`"), "why its output is not compared"),
    "comment for nbval": (swap(3, "x = 1", "# NBVAL_IGNORE_OUTPUT\nx = 1"), "comment that steers nbval"),
    "another shard": (swap(3, "x = 1", "def shard(n, rank, world_size):\n    return range(n)"), "not the shard of"),
    "long float": (prints("loss 0.31234\n"), "'0.31234', a float"),
    "long float as a result": (output(3, "execute_result", {"text/plain": "1.000001"}), "a float"),
    "long float in an error": (lambda nb: nb.cells[5].outputs[0].update(evalue="0.31234"), "a float"),
    "address": (prints("<object at 0x7f3c5e0a4b20>\n"), "an object address"),
    "endpoint": (prints("closed by peer [127.0.0.1]:4321\n"), "a port"),
    "port": (prints("port 29500\n"), "a port"),
    "pid": (prints("PID: 17\n"), "a pid"),
    "temporary path": (prints("saved /tmp/a.pt\n"), "a path of one machine"),
    "home": (prints("'/home/me/a.pt'\n"), "a path of one machine"),
    "repository": (prints(f"{ROOT}\n"), "a path of one machine"),
    "progress bar": (prints(" 10%|# | 1/10\n"), "progress bar"),
    "carriage return": (prints("1\r2\n"), "carriage return"),
    "ANSI code": (prints("\x1b[1mbold\n"), "ANSI code"),
    "big picture": (lambda nb: nb.cells[9].outputs[0].data.update({"image/png": BIG}), "PNG of over 100 kB"),
    "vector picture": (output(9, "display_data", {"image/svg+xml": "<svg/>"}), "draw PNG"),
    "silent picture": (swap(9, "assert x == 1", "# assert"), "print or assert what it shows"),
    "no alt text": (swap(4, "![Two ranks]", "![ ]"), "has no alt text"),
    "no alt text in HTML": (swap(4, "![Two ranks](", '<img src="figures/ranks.png">('), "has no alt text"),
    "no such picture": (swap(4, "ranks.png", "rank.png"), "'figures/rank.png' is not a file"),
    "picture from the network": (swap(4, "figures/", "https://example.org/"), "is not a file beside"),
    "no such notebook": (swap(12, "02_next", "03_next"), "'03_next.ipynb#top' is not a file"),
    "absolute link": (swap(12, "02_next.ipynb", "/etc/passwd"), "is not a file beside"),
    "simply": (swap(2, "What", "Simply, what"), "'simply' in the prose"),
    "old launcher": (swap(3, "x = 1", "!python -m torch.distributed.launch"), "use torchrun"),
    "old all_gather": (swap(3, "x = 1", "dist.all_gather_into_tensor(a, b)"), "list form of all_gather"),
    "old reduce_scatter": (
        swap(3, "x = 1", "dist.reduce_scatter_tensor(a, b)"),
        "list form of reduce_scatter",
    ),
}

ALLOWED: dict[str, Callable[[NotebookNode], object]] = {
    "five things to learn": lambda nb: [
        swap(0, "- stop.", "- a\n- b\n- c")(nb),
        swap(12, "* st", "* a\n* b\n* st")(nb),
    ],
    "bold parts with a colon": swap(0, "*You need.*", "**You need:**"),
    "capitals of a name": swap(0, "the ranks", "DDP ranks and Slurm"),
    "eight sections": swap(4, "It fails.", "a\n" + "## B\n\nb\n" * 4),
    "25 lines": swap(3, "x = 1\n", "x = 1\n" * 24),
    "60 lines in one piece": swap(11, "assert", "\n" * 15 + "assert"),
    "three ignored cells": lambda nb: [
        (tag(i, IGNORED)(nb), swap(i - 1, "##", "Not compared.\n\n##")(nb)) for i in (3, 9)
    ],
    "a picture at the limit": lambda nb: nb.cells[9].outputs[0].data.update({"image/png": AT_LIMIT}),
    "a picture that is printed": swap(9, "assert x == 1", "print(x)"),
    "four decimals": prints("loss 0.3123, 12345 samples, 1e-05\n"),
    "percent": prints("2560/6000 (43%)\n"),
    "a relative path": prints("figures/tmp/a.png and ./home/b\n"),
    "a link to the web and within": swap(4, "It fails.", "[a](https://example.org/a) [b](#First)"),
    "a link in code": swap(4, "It fails.", "`[a](nowhere.md)`\n\n```\n[a](nowhere.md)\n```\n"),
    "an image in HTML": swap(4, "It fails.", '<img src="figures/ranks.png" alt="Two ranks">'),
    "a helper's code without its types": swap(
        3,
        "x = 1",
        f"x = 1\n{next(code for code in helper_code()['rank'] if 'get_rank' in code)}",
    ),
    "a simple word": swap(4, "It fails.", "Simple."),
    "magics": swap(3, "x = 1", "%time x = 1\n!ls"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a notebook folder with the files that the good notebook links."""
    made = tmp_path / "notebooks"
    (made / "figures").mkdir(parents=True)
    for name in ("figures/ranks.png", "02_next.ipynb"):
        (made / name).touch()
    return made


def test_good_notebook_passes(folder: Path) -> None:
    assert problems(good(), folder) == []
    (folder / "01_good.ipynb").write_text(nbformat.writes(good()), encoding="utf-8")
    assert problems(read(folder / "01_good.ipynb"), folder) == []


@pytest.mark.parametrize("name", BROKEN)
def test_broken_notebook_is_reported(name: str, folder: Path) -> None:
    change, complaint = BROKEN[name]
    nb = good()
    change(nb)
    assert any(complaint in problem for problem in problems(nb, folder)), problems(nb, folder)


@pytest.mark.parametrize("name", ALLOWED)
def test_unusual_notebook_passes(name: str, folder: Path) -> None:
    nb = good()
    ALLOWED[name](nb)
    assert problems(nb, folder) == []


def test_every_rule_bites(folder: Path) -> None:
    silent = {check.__name__ for check in RULES}
    for change, _ in BROKEN.values():
        nb = good()
        change(nb)
        silent -= {check.__name__ for check in RULES if list(check(nb, folder))}
    assert not silent


def test_exercises_are_due_once_there_are_checkers(folder: Path) -> None:
    (folder.parent / "ddp_helpers").mkdir()
    (folder.parent / "ddp_helpers" / "checks.py").touch()
    nb = good()
    assert any("last ## headings" in problem for problem in problems(nb, folder))
    swap(12, "## Recap", "## Exercises\n\nTwo.\n\n## Recap")(nb)
    assert problems(nb, folder) == []


def test_empty_notebook_is_reported_not_raised(folder: Path) -> None:
    assert len(problems(new_notebook(), folder)) > 5


def test_readme_table_is_compared() -> None:
    names = ["00_a.ipynb", "01_b.ipynb"]
    rows = [f"| 0 | [A](notebooks/{name}) |" for name in names]
    assert readme_problems("\n".join(["See [x](notebooks/09_x.ipynb).", *rows]), names) == []
    assert readme_problems("\n".join(rows[:1]), names)
    assert readme_problems("\n".join([*rows, rows[1]]), names)
    assert readme_problems("\n".join(rows[::-1]), names)
    assert readme_problems("\n".join(rows), names[:1])


def test_stray_notebooks_are_found(tmp_path: Path) -> None:
    for name in (
        "notebooks/00_a.ipynb",
        "notebooks/Untitled.ipynb",
        "notebooks/solutions/00_a.ipynb",
        "notebooks/.ipynb_checkpoints/00_a.ipynb",
        "tests/a.ipynb",
        "other/a.ipynb",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert stray_notebooks(tmp_path) == [
        "notebooks/Untitled.ipynb",
        "notebooks/solutions/00_a.ipynb",
        "tests/a.ipynb",
    ]
