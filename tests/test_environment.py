"""What the project says of itself is true: dependencies, layers, README, sizes."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = sorted(path.stem for path in (ROOT / "ddp_helpers").glob("*.py") if path.stem != "__init__")
MAY_IMPORT = {  # module of the package -> modules of the package that it may import
    "devices": set(),
    "models": set(),
    "show": set(),
    "process_group": set(),
    "data": {"process_group"},
    "timeline": {"process_group"},
    "sampling": set(),
    "checkpoint": {"process_group", "devices", "data", "models"},
    "evaluation": {"process_group", "devices", "data", "models"},
    "training": {"process_group", "devices", "data", "models"},
    "checks": {"launcher"},
    "pytest_plugin": {"launcher"},
    "train_mnist": {"launcher", "process_group", "devices", "data", "models", "evaluation", "training", "checkpoint"},
}


def read_toml() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_environment_yml_lists_what_pyproject_depends_on():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = environment["dependencies"]
    (pip,) = [entry["pip"] for entry in conda if isinstance(entry, dict)]
    project = read_toml()["project"]
    assert pip == [*project["dependencies"], "-e ."]
    assert conda[:2] == [f"python{project['requires-python']}", "pip"]


SHOW = sorted(path.stem for path in (ROOT / "ddp_helpers/show").glob("[!_]*.py"))


def package_imports(file: Path) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level == 1:
                found |= {name.split(".")[0]} if name else {alias.name for alias in node.names}
            elif name.startswith("ddp_helpers"):
                found |= {name.split(".")[1]} if "." in name else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("ddp_helpers.")}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_the_layers_below(module):
    assert package_imports(ROOT / "ddp_helpers" / f"{module}.py") <= MAY_IMPORT[module]


def test_the_launcher_imports_nothing_of_the_package():
    for file in (ROOT / "ddp_helpers/launcher").glob("*.py"):
        assert package_imports(file) <= {f.stem for f in file.parent.glob("*.py")}, file


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_must_be_copied_and_stay_small(module):
    text = (ROOT / "ddp_helpers" / f"{module}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "needs" in docstring.split("\n\n")[0], "the first lines of a module say what it needs"
    assert text.count("\n") <= 260


@pytest.mark.parametrize("module", SHOW)
def test_figures_need_their_style_and_stay_small(module):
    file = ROOT / "ddp_helpers/show" / f"{module}.py"
    text = file.read_text()
    assert package_imports(file) <= {"style"}
    assert "needs" in (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    assert text.count("\n") <= 200


def test_importing_the_package_is_light():
    heavy = ("torchvision", "matplotlib", "IPython")
    code = f"import sys, torch, ddp_helpers; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_only_show_imports_matplotlib():
    for file in (ROOT / "ddp_helpers").rglob("*.py"):
        if file.parent.name != "show":
            assert "import matplotlib" not in file.read_text(), file


def test_readme_links_exist():
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / target).exists(), target


def readme_commands() -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_exist(command):
    """Each command of the README is one that this repository has: a make target, a module, a file."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif "ddp_helpers" in command:
        module = next(word for word in words if word.startswith("ddp_helpers."))
        assert (ROOT / (module.replace(".", "/") + ".py")).exists()
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        for option in [
            word for word in words if word.startswith("--") and word not in ("--nproc-per-node", "--standalone")
        ]:
            assert option in done.stdout, option
    elif words[0] == "pytest":
        assert words[1:] in (["--nbval"], ["--nbval", "notebooks"])
    else:
        assert words[:2] in (["conda", "env"], ["conda", "activate"]), f"no test knows how to check {command!r}"


def test_the_project_speaks_of_itself_alone():
    """No text of the project names where it was made."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = re.compile(r"\b(issue \d|\.\./shared|curriculum\.md|design\.md|facts page|/work/)", re.I)
    for name in files:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".ipynb", ".toml", ".yml", ".cfg"}
            and path != Path(__file__)
            and path.exists()
        ):
            assert not words.search(path.read_text()), (name, words.search(path.read_text()))
