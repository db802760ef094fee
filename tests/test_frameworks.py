"""The files that use Accelerate and Lightning train on two ranks to the weights of one process at the global batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

from ddp_helpers.data import load_mnist, prepare_mnist
from ddp_helpers.models import MLP

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def alone(order: list[int] | range) -> dict[str, torch.Tensor]:
    """Train one epoch in this process, 256 images a step, in this order; the last, partial batch is left out."""
    train = load_mnist(prepare_mnist(full=False), train=True)
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(order) - 255, 256):
        images, labels = train.__getitems__(order[start : start + 256])
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "launcher", "order"),
    [
        ("accelerate", TORCHRUN, range(12_000)),
        # Lightning shuffles training data, as DistributedSampler does, even if the loader does not
        ("lightning", [sys.executable], list(DistributedSampler(range(12_000), 1, 0, shuffle=True, seed=0))),  # type: ignore[arg-type]
    ],
    ids=["accelerate", "lightning"],
)
def test_a_framework_does_the_same_maths(package: str, launcher: list[str], order: list[int], tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[bench]' brings it")
    script = ROOT / "notebooks" / "scripts" / f"with_{package}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DDP_MNIST": "subset"}
    done = subprocess.run([*launcher, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = torch.load(tmp_path / "mnist.pt", weights_only=True)
    for name, value in alone(order).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
