"""In a real Jupyter kernel: interrupts, restarts, a killed kernel, and what travels between notebook and ranks."""

import os
import re
import signal
import uuid

import jupyter_client
import pytest
from looking import SECONDS, children, gone, sleepers, with_text

START = "from ddp_helpers import Ranks, launch\nimport os, time\n%load_ext ddp_helpers.launcher"


class Kernel:
    """A kernel and a client that runs cells in it."""

    def __init__(self):
        self.manager, self.client = jupyter_client.manager.start_new_kernel(kernel_name="python3", startup_timeout=240)
        self.run(START)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def run(self, source, when="", do=lambda: None):
        """Run a cell and return (its text, "Name: text" of its errors); call `do` once `when` was printed."""
        text, errors = "", []

        def hook(message):
            nonlocal text, do
            if message["msg_type"] == "error":
                errors.append(f"{message['content']['ename']}: {message['content']['evalue']}")
            text += message["content"].get("text", "")
            if when and when in text:
                do()
                do = int

        self.client.execute_interactive(source, timeout=20 * SECONDS, output_hook=hook, stop_on_error=False)
        return text, errors

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


SLEEPS = "def work(*_):\n    print('now', flush=True)\n    time.sleep(600)\n"
STUBBORN = """def work(*_):
    print('now', flush=True)
    while True:
        try: time.sleep(600)
        except KeyboardInterrupt: pass
"""


@pytest.mark.parametrize("target", ["the group", "the kernel alone"])
@pytest.mark.parametrize("ranks", [SLEEPS, STUBBORN], ids=["sleeping", "stubborn"])
def test_an_interrupt_ends_the_cell_with_one_error(kernel, ranks, target):
    def interrupt():
        kernel.manager.interrupt_kernel() if target == "the group" else os.kill(kernel.pid, signal.SIGINT)

    before = children(kernel.pid)
    _, errors = kernel.run(ranks + "launch(work)", "now", interrupt)
    assert errors == ["KeyboardInterrupt: "]
    assert gone(set(children(kernel.pid)) - set(before))
    _, errors = kernel.run(
        "ranks = Ranks(2)\n" + ranks + "kept = ranks.run(os.getpid)\nranks.run(work)", "now", interrupt
    )
    if ranks is SLEEPS:
        assert len(errors) == 1 and errors[0].startswith("KeyboardInterrupt: the ranks kept their variables")
        assert kernel.run("print(ranks.run(os.getpid) == kept)") == ("True\n", [])
    else:
        assert errors == [
            "KeyboardInterrupt: the ranks did not come back and were ended: ranks.restart() starts new ones"
        ]
        assert gone(set(children(kernel.pid)) - set(before))
    assert kernel.run("print(launch(abs, nprocs=1)); ranks.close()") == ("[0]\n", [])


def test_an_interrupt_while_the_notebook_does_something_else_leaves_idle_ranks_alone(kernel):
    kernel.run("ranks = Ranks(1)\npids = ranks.run(os.getpid)")
    _, errors = kernel.run("print('now', flush=True); time.sleep(600)", "now", kernel.manager.interrupt_kernel)
    assert errors == ["KeyboardInterrupt: "]
    assert kernel.run("print(ranks.run(os.getpid) == pids); ranks.close()") == ("True\n", [])


def test_weights_and_classes_of_the_notebook_reach_the_ranks_and_stay_in_the_notebook(kernel):
    source = """
import dataclasses, enum, torch
class Kind(enum.Enum):
    A = FACTOR
@dataclasses.dataclass
class Result:
    kind: Kind
    weight: float
    def factor(self): return FACTOR
model = torch.nn.Linear(1, 1)
with torch.no_grad(): model.weight.fill_(FACTOR)
def work(rank, model):
    with torch.no_grad(): model.weight += rank + 1
    return Result(Kind.A, model.weight.item())
found = launch(work, (model,))
print([type(r) is Result and r.kind is Kind.A and r.factor() for r in found], [r.weight for r in found])
print(model.weight.item())
"""
    for factor in (2, 5):
        text, errors = kernel.run(source.replace("FACTOR", str(factor)))
        assert (text, errors) == (
            f"[{factor}, {factor}] [{factor}.0, {factor + 2}.0]\n{factor}.0\n".replace(
                f"[{factor}.0", f"[{factor + 1}.0"
            ),
            [],
        )


def test_an_error_names_the_cell(kernel):
    _, errors = kernel.run("def work(rank):\n    return 1 // rank\nlaunch(work)")
    pattern = r"RankError: rank 0 raised ZeroDivisionError in cell \d+, line 2: integer division or modulo by zero"
    assert len(errors) == 1 and re.fullmatch(pattern, errors[0])
    kernel.run("ranks = Ranks(2)")
    _, errors = kernel.run("%%ranks\nimport os\n1 // int(os.environ['RANK'])")
    assert len(errors) == 1 and re.fullmatch(pattern.replace("line 2", "line 3"), errors[0])
    kernel.run("ranks.close()")


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_a_kernel_that_ends_takes_its_ranks_along(end):
    """With the programs that they started, while another kernel's ranks work on."""
    token, other = f"kernel-{uuid.uuid4().hex}", Kernel() if end == "kill" else None
    kernel = Kernel()
    try:
        if other:
            other.run("ranks = Ranks(1)\npids = ranks.run(os.getpid)")
        started = []

        def stop():
            started.extend([p for p in children(kernel.pid)] + with_text(token))
            if end == "kill":
                os.kill(kernel.pid, signal.SIGKILL)
            else:
                kernel.manager.restart_kernel(now=True)

        source = (
            f"def work(rank):\n    exec({sleepers(token)!r}, {{}})\n    import ctypes\n    print('now', flush=True)\n"
        )
        kernel.client.execute(source + "    ctypes.PyDLL(None).sleep(600)\nlaunch(work)")
        text = ""
        while "now" not in text:
            content = kernel.client.get_iopub_msg(timeout=20 * SECONDS)["content"]
            assert "ename" not in content, content
            text += content.get("text", "")
        stop()
        assert len(started) >= 2 and gone(started, SECONDS)
        assert with_text(token) == []
        if other:
            assert other.run("print(ranks.run(os.getpid) == pids)") == ("True\n", [])
    finally:
        kernel.close()
        if other:
            other.close()
