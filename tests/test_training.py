"""Wrapping by device, and one epoch with its log line and its mean loss."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_helpers import launch, training
from ddp_helpers.process_group import rank, setup, teardown
from ddp_helpers.training import accumulate, train_epoch, unused_parameters, wrap


def classifier(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Dropout(dropout), nn.LogSoftmax(1))


def loader_of(n: int, batch_size: int, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(n, 3, generator=generator), torch.randint(2, (n,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size)


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that leaves the weights, so that losses can be computed afterwards."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def losses_of(model: nn.Module, loaders: Sequence[DataLoader[Any]]) -> Tensor:
    """Return the loss of each sample."""
    with torch.no_grad():
        return torch.cat([F.nll_loss(model(x), y, reduction="none") for loader in loaders for x, y in loader])


def test_the_loss_is_a_mean_over_samples_not_over_batches() -> None:
    model, loader = classifier(), loader_of(10, 4)  # batches of 4, 4 and 2
    found = train_epoch(model, loader, still(model), 1, log_every=0)
    batches = [F.nll_loss(model(x), y).item() for x, y in loader]
    assert found == pytest.approx(losses_of(model, [loader]).mean().item(), rel=1e-6)
    assert found != pytest.approx(sum(batches) / 3, rel=1e-4)


def test_an_epoch_is_the_classic_loop() -> None:
    model, loader = classifier(dropout=0.5), loader_of(10, 4)
    model.eval()
    torch.manual_seed(1)
    train_epoch(model, loader, torch.optim.Adam(model.parameters(), lr=0.1), 1, log_every=0)
    expected = classifier(dropout=0.5)
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    torch.manual_seed(1)
    for x, y in loader:
        optimizer.zero_grad()
        F.nll_loss(expected(x), y).backward()
        optimizer.step()
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_another_loss_and_no_samples() -> None:
    model = classifier()
    ones = train_epoch(model, loader_of(5, 2), still(model), 1, log_every=0, loss_fn=lambda y, _: (y * 0 + 1).mean())
    assert ones == 1.0
    assert math.isnan(train_epoch(model, loader_of(0, 2), still(model), 1))


def test_the_log_line(capsys: pytest.CaptureFixture[str]) -> None:
    model, loader = classifier(), loader_of(10, 2)
    train_epoch(model, loader, still(model), 7, log_every=2)
    losses = [F.nll_loss(model(x), y).item() for x, y in loader]
    assert capsys.readouterr().out.splitlines() == [
        f"Train Epoch: 7 [4/10 (40%)]  Loss: {losses[1]:.6f}",
        f"Train Epoch: 7 [8/10 (80%)]  Loss: {losses[3]:.6f}",
    ]
    train_epoch(model, loader, still(model), 7, log_every=0)
    assert capsys.readouterr().out == ""


def test_one_rank_needs_no_wrapper() -> None:
    model = nn.BatchNorm1d(2)
    assert wrap(model, "cpu") is model


class OnGpu(nn.Module):
    """Says that it is on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def to(self, device: torch.device) -> OnGpu:  # type: ignore[override]
        self.device = device
        return self


def test_a_gpu_gets_device_ids_and_synced_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "world_size", lambda: 2)
    monkeypatch.setattr(training, "DistributedDataParallel", lambda model, **arguments: (model, arguments))
    gpu = torch.device("cuda", 1)
    model, arguments = wrap(OnGpu(), "cuda:1")  # type: ignore[misc]
    assert (model.device, arguments) == (gpu, {"device_ids": [gpu]})
    assert type(model.norm) is nn.SyncBatchNorm


def on_each_rank(r: int) -> dict[str, Any]:
    """Wrap and train on two ranks with unequal batches, in one launch."""
    setup()
    plain, normed = wrap(classifier(), "cpu"), wrap(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), "cpu")
    loader = loader_of(*((6, 3), (4, 2))[rank()], seed=r)  # two batches on each
    found = {
        "types": [type(plain) is DistributedDataParallel, type(normed.module[0]) is nn.BatchNorm1d],
        "loss": train_epoch(plain, loader, still(plain), 1, log_every=1),
    }
    del plain, normed
    teardown()
    return found


def test_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    results = launch(on_each_rank, nprocs=2, timeout=60)
    loaders = [loader_of(6, 3, seed=0), loader_of(4, 2, seed=1)]
    parts = [losses_of(classifier(), [loader]).mean().item() for loader in loaders]
    mean = losses_of(classifier(), loaders).mean().item()
    assert abs(sum(parts) / 2 - mean) > 1e-3  # the mean of the ranks' means is another number
    for found in results:
        assert found["types"] == [True, True]
        assert found["loss"] == pytest.approx(mean, rel=1e-6)
    note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("[rank 0] Note: SyncBatchNorm needs GPUs")
    assert [re.sub(r"\d\.\d{6}$", "…", line) for line in lines] == [
        "[rank 0] Train Epoch: 1 [3/6 (50%)]  Loss: …",
        "[rank 0] Train Epoch: 1 [6/6 (100%)]  Loss: …",
    ]


def test_unused_parameters_are_named_without_the_wrapper() -> None:
    def work(rank: int) -> list[list[str]]:
        dist.init_process_group("gloo")
        found = []
        for wrapper in (lambda m: m, lambda m: wrap(m, "cpu")):
            model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
            model["frozen"].requires_grad_(False)
            model.forward = lambda x, model=model: model["used"](x)
            wrapped = wrapper(model)
            found.append(unused_parameters(wrapped))
            wrapped(torch.ones(1, 2)).sum().backward()
            found.append(unused_parameters(wrapped))
        dist.destroy_process_group()
        return found

    everything, spare = ["used.weight", "used.bias", "spare.weight", "spare.bias"], ["spare.weight", "spare.bias"]
    assert launch(work) == [[everything, spare] * 2] * 2


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [8]])
def test_accumulation_is_one_large_batch_with_one_set_of_all_reduces(sizes: list[int]) -> None:
    def work(rank: int) -> tuple[list[Tensor], list[Tensor], float, float, int, int]:
        dist.init_process_group("gloo")
        torch.manual_seed(rank)
        inputs, labels = torch.randn(8, 3), torch.randint(2, (8,))
        counts, results = [], []
        for parts in ([8], sizes):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1)))
            sent: list[int] = []

            def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations: none, or its own
                state.append(bucket.index())
                return allreduce_hook(None, bucket)

            model.register_comm_hook(sent, count)
            loss = accumulate(model, list(zip(inputs.split(parts), labels.split(parts), strict=True)))
            results.append(([p.grad for p in model.parameters()], loss.item()))
            counts.append(len(sent))
        dist.destroy_process_group()
        return results[0][0], results[1][0], results[0][1], results[1][1], counts[0], counts[1]

    for large, small, loss, same_loss, once, again in launch(work):
        assert once == again == 1 and same_loss == pytest.approx(loss, abs=1e-6)
        for a, b in zip(large, small, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_accumulation_works_without_a_wrapper_and_needs_a_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
    loss = accumulate(model, [(torch.ones(2, 3), torch.tensor([0, 1]))] * 2)
    assert loss.item() == pytest.approx(F.nll_loss(model(torch.ones(2, 3)), torch.tensor([0, 1])).item())
    with pytest.raises(ValueError, match="no micro-batches"):
        accumulate(model, [])
