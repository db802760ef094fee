"""A small driver for tests in a real browser: JupyterLab on a folder, one notebook page, what is on it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
START_SECONDS = 180.0  # for the server, the page and the kernel, on a busy machine
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # every output is on the page, seen or not
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
CELLS = """() => [...document.querySelectorAll('.jp-Notebook .jp-Cell')].map(cell => ({
    code: cell.classList.contains('jp-CodeCell'),
    prompt: cell.querySelector('.jp-InputPrompt')?.textContent.trim() ?? '',
    text: [...cell.querySelectorAll('.jp-OutputArea-output')].map(output => output.textContent).join('\\n'),
    errors: cell.querySelectorAll('[data-mime-type$="jupyter.error"], [data-mime-type$="jupyter.stderr"]').length,
}))"""
T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T], seconds: float) -> T:
    """Return the first true value that `look()` gives; raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)
    return found


class Lab:
    """A JupyterLab server on `folder`; settings, workspaces and logs are kept in `home`."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home, self.token, self.mark = folder, home, uuid.uuid4().hex, uuid.uuid4().hex
        self.port = 0  # until the server has chosen one
        for name, text in SETTINGS.items():
            path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "DDP_MNIST")}
        env.update(
            LAB_MARK=self.mark,  # every process of this server inherits it
            JUPYTER_CONFIG_DIR=str(home / "config"),
            JUPYTER_DATA_DIR=str(home / "data"),
            JUPYTER_RUNTIME_DIR=str(home / "runtime"),
            JUPYTERLAB_SETTINGS_DIR=str(home / "settings"),
            JUPYTERLAB_WORKSPACES_DIR=str(home / "workspaces"),
            IPYTHONDIR=str(home / "ipython"),
        )
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
        command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--ServerApp.port_retries=0"]
        command += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}"]
        self.log = home / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, cwd=home, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self) -> "Lab":
        try:
            wait_for("the JupyterLab server", self._answers, START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for pid in self.processes():  # what a failed test left; nobody else has this server's mark
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended:\n{self.log.read_text()[-2000:]}")
        for file in (self.home / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(OSError, ValueError):  # half written
                self.port = json.loads(file.read_text())["port"]
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api?token={self.token}", timeout=5))
        except OSError:
            return False

    def processes(self, variable: str = "LAB_MARK") -> set[int]:
        """Return the processes of this server that were started with the environment variable `variable`."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                ours = f"LAB_MARK={self.mark}".encode() in environ
                if ours and any(entry.startswith(f"{variable}=".encode()) for entry in environ):
                    found.add(int(folder.name))
        return found

    def ranks(self) -> set[int]:
        """Return the rank processes of this server's kernels."""
        return self.processes("DDP_HELPERS_MARK")


class Notebook:
    """One notebook on a page of JupyterLab; cells are counted from 0, text cells included."""

    def __init__(self, page: "Page", lab: Lab, name: str) -> None:
        self.page, self.path = page, lab.folder / name
        page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/{name}?reset&token={lab.token}", timeout=1e3 * START_SECONDS)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=1e3 * START_SECONDS)
        wait_for("an idle kernel", lambda: self.status() == "idle", START_SECONDS)

    def status(self) -> str:
        """Return what the kernel does, as the page knows it: starting, idle, busy, …"""
        return self._ask("panel.sessionContext.session?.kernel?.status ?? ''")

    def _ask(self, expression: str) -> Any:
        return self.page.evaluate(f"() => {{ const panel = jupyterapp.shell.currentWidget; return {expression} }}")

    def cells(self) -> list[dict[str, Any]]:
        """Return what the page shows: for each cell code (or text), prompt, text of the outputs, number of errors."""
        return self.page.evaluate(CELLS)

    def menu(self, *items: str) -> None:
        """Click through a menu, such as ("Run", "Run All Cells")."""
        self.page.locator(".lm-MenuBar-item", has_text=items[0]).first.click()
        for item in items[1:]:
            label = self.page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True)
            label.locator("xpath=ancestor::li").click()

    def run_all(self) -> None:
        """Click on Run → Run All Cells."""
        self.menu("Run", "Run All Cells")

    def run_cell(self, index: int) -> None:
        """Select a cell and press Ctrl-Enter."""
        self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Control+Enter")

    def wait_until_done(self, seconds: float) -> None:
        """Wait until no cell waits or runs and the kernel is idle."""

        def done() -> bool:
            return self.status() == "idle" and not any("*" in cell["prompt"] for cell in self.cells())

        wait_for("the last cell", done, seconds)

    def interrupt(self) -> None:
        """Press the toolbar's interrupt button."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-command="notebook:interrupt-kernel"]').first.click()

    def restart(self) -> None:
        """Press the toolbar's restart button and confirm."""
        self.page.locator('.jp-NotebookPanel-toolbar [data-command="notebook:restart-kernel"]').first.click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def save(self) -> None:
        """Press Ctrl-S and wait until the file holds what the page shows."""
        self.page.keyboard.press("Control+s")
        wait_for("the saved file", lambda: not self._ask("panel.context.model.dirty"), 30)

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark"."""
        self.page.evaluate(f"() => jupyterapp.commands.execute('apputils:change-theme', {{theme: {name!r}}})")
        light = str("Light" in name).lower()
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_timeout(500)

    def screenshot(self, path: Path, cell: int) -> None:
        """Save a picture of the window with a cell at its top."""
        self.page.locator(".jp-Notebook .jp-Cell").nth(cell).evaluate("c => c.scrollIntoView({block: 'start'})")
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=path)


@contextlib.contextmanager
def browser_page(home: Path) -> Iterator["Page"]:
    """Start Chromium with a fresh profile in `home` and yield its page."""
    from playwright.sync_api import sync_playwright  # here, so that a machine without it can skip the tests

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            home / "profile",
            executable_path=CHROMIUM,
            args=FLAGS,
            viewport={"width": 1280, "height": 1600},
        )
        try:
            yield context.pages[0]
        finally:
            context.close()
