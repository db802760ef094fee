"""`make lab` serves JupyterLab, and a notebook runs through the server's own kernel."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import nbformat
import pytest
import websocket

ROOT = Path(__file__).parent.parent
TOKEN = "reader"


@pytest.fixture
def server(tmp_path):
    """Start what `make lab` starts, on a free port and without a browser; yield its address once it answers."""
    arguments = f"--no-browser --allow-root --port=0 --ServerApp.port_retries=0 --IdentityProvider.token={TOKEN}"
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    log = tmp_path / "log"
    with log.open("w") as file:
        command = ["make", "lab", f"LAB_ARGS={arguments}"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield wait_until_it_answers(process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_it_answers(process: subprocess.Popen, log: Path, seconds: float = 90.0) -> str:
    """Return the server's address; it prints the address before it listens, so ask until there is an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"http://(?:127\.0\.0\.1|localhost):(\d+)/lab", log.read_text())
        if found:
            with contextlib.suppress(urllib.error.URLError):
                call(f"http://127.0.0.1:{found[1]}/api/status")
                return f"http://127.0.0.1:{found[1]}"
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer; its log:\n{log.read_text()}")


def call(url: str, data: dict | None = None) -> dict | str:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Authorization": f"token {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return json.loads(text) if answer.headers["Content-Type"].startswith("application/json") else text


def execute(socket: websocket.WebSocket, code: str) -> str:
    """Run one cell; return the error's name, or nothing."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "session": "s",
        "username": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    socket.send(json.dumps(message))
    while True:
        answer = json.loads(socket.recv())
        if answer["parent_header"].get("msg_id") == header["msg_id"] and answer["msg_type"] == "execute_reply":
            return answer["content"].get("ename", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00_check_your_machine", "06_train_mnist"])
def test_make_lab_serves_a_notebook_that_runs(server, name):
    path = f"{name}.ipynb"
    assert "jupyterlab" in str(call(f"{server}/lab/tree/{path}")).lower()
    content = call(f"{server}/api/contents/{path}")["content"]
    session = call(
        f"{server}/api/sessions", {"path": path, "type": "notebook", "name": name, "kernel": {"name": "python3"}}
    )
    address = server.replace("http", "ws") + f"/api/kernels/{session['kernel']['id']}/channels"
    socket = websocket.create_connection(address, header={"Authorization": f"token {TOKEN}"}, timeout=300)
    for cell in nbformat.from_dict(content).cells:
        if cell.cell_type == "code":
            error = execute(socket, "".join(cell.source))
            assert bool(error) == ("raises-exception" in cell.metadata.get("tags", [])), (error, cell.source)
    socket.close()
    request = urllib.request.Request(
        f"{server}/api/sessions/{session['id']}", method="DELETE", headers={"Authorization": f"token {TOKEN}"}
    )
    urllib.request.urlopen(request, timeout=60)
