"""Exact evaluation: each sample once, for any size and any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

from ddp_helpers import launch
from ddp_helpers.data import BatchedDataset
from ddp_helpers.evaluation import Evaluation, evaluate
from ddp_helpers.process_group import setup, teardown

WORLD = 3
SIZES = (0, 1, 2, 4, 10, 31)


class Table(nn.Module):
    """Answers with the log-probabilities that the input row holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def samples(n: int) -> BatchedDataset:
    """Return n random log-probabilities [n, 5] with labels, some of them right."""
    generator = torch.Generator().manual_seed(n)
    outputs = torch.randn(n, 5, generator=generator).log_softmax(1)
    return BatchedDataset(outputs, torch.randint(5, (n,), generator=generator), transform=None)


def four_of_ten() -> BatchedDataset:
    """Only samples 0 to 3 are right: padding to twelve counts 0 and 1 twice, and says 0.5."""
    outputs = torch.tensor([0.9, 0.1]).log().repeat(10, 1)
    return BatchedDataset(outputs, torch.tensor([0] * 4 + [1] * 6), transform=None)


def a_large_loss() -> BatchedDataset:
    """Nine losses of 1 after one of 2**24, which a float32 sum would swallow."""
    outputs = torch.full((10, 2), -1.0)
    outputs[0] = -(2.0**24)
    return BatchedDataset(outputs, torch.zeros(10, dtype=torch.int64), transform=None)


def normed(r: int = 0) -> nn.Module:
    """Return a classifier whose BatchNorm remembers other statistics on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.LogSoftmax(1))
    assert isinstance(model[0].running_mean, Tensor)
    model[0].running_mean += 3 * r
    return model


def truth(model: nn.Module, dataset: BatchedDataset) -> Evaluation:
    """Evaluate in one pass, by hand."""
    with torch.no_grad():
        outputs = model.eval()(dataset.images)
    right, n = int((outputs.argmax(1) == dataset.labels).sum()), len(dataset)
    loss = F.nll_loss(outputs, dataset.labels, reduction="none").double().mean().item()
    return Evaluation(loss, right / n if n else float("nan"), right, n)


def same(found: Evaluation, expected: Evaluation) -> bool:
    near = all(math.isclose(a, b, rel_tol=1e-6) or (a != a and b != b) for a, b in zip(found, expected, strict=True))
    return near and found[2:] == expected[2:]


def test_one_process_counts_each_sample_once() -> None:
    for n in SIZES:
        for batch_size in (1, 4, 100):
            assert same(evaluate(Table(), samples(n), batch_size), truth(Table(), samples(n)))
    assert evaluate(Table(), a_large_loss(), 1).loss == (2**24 + 9) / 10


def test_no_samples_have_no_accuracy() -> None:
    loss, accuracy, correct, count = evaluate(Table(), samples(0), 4)
    assert (correct, count) == (0, 0) and loss != loss and accuracy != accuracy


def test_any_data_set_will_do() -> None:
    data = samples(10)
    assert evaluate(Table(), TensorDataset(data.images, data.labels), 4) == evaluate(Table(), data, 4)
    part = evaluate(Table(), Subset(data, range(7)), 4, collate_fn=BatchedDataset.collate)
    assert same(part, truth(Table(), BatchedDataset(data.images[:7], data.labels[:7], transform=None)))


def test_modes_and_random_numbers_are_left_alone() -> None:
    model = normed().train()
    model[0].eval()  # a frozen BatchNorm
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    evaluate(model, samples(10), 4)
    assert [m.training for m in model.modules()] == [True, False, True, True]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_modes_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 2)).train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        evaluate(model, samples(10), 4)
    assert model.training and model[0].training


def on_each_rank(r: int) -> dict[str, Any]:
    """Evaluate everything on this rank's shard, in one launch."""
    setup()
    found: dict[str, Any] = {f"n={n}": evaluate(Table(), samples(n), 4) for n in SIZES}
    found["four of ten"] = evaluate(Table(), four_of_ten(), 2)
    found["large loss"] = evaluate(Table(), a_large_loss(), 1)
    ddp = DistributedDataParallel(normed())
    ddp.module[0].running_mean += 3 * r
    passes: list[Any] = []
    ddp.register_forward_pre_hook(lambda module, inputs: passes.append(inputs))
    found["normed"] = evaluate(ddp, samples(10), 1)  # 4, 3 and 3 batches: the wrapper would broadcast in each
    found["passes through the wrapper"] = len(passes)
    found["mean after"] = ddp.module[0].running_mean.tolist()
    ddp.broadcast_buffers = False
    ddp.module[0].running_mean += 3 * r
    own = evaluate(ddp, samples(10), 1)
    found["own mean"] = ddp.module[0].running_mean[0].item()
    found["own"] = own
    del ddp
    teardown()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(on_each_rank, nprocs=WORLD, timeout=60)


def test_ranks_together_count_each_sample_once(results: list[dict[str, Any]]) -> None:
    for n in SIZES:
        assert all(same(r[f"n={n}"], truth(Table(), samples(n))) for r in results), n
    for r in results:
        assert r["four of ten"][1:] == (0.4, 4, 10)
        assert r["large loss"].loss == (2**24 + 9) / 10


def test_every_rank_has_the_same_numbers(results: list[dict[str, Any]]) -> None:
    for name in ("n=31", "four of ten", "large loss", "normed", "own"):
        assert len({r[name] for r in results}) == 1, name


def test_batch_norm_is_evaluated_with_the_buffers_of_rank_0(results: list[dict[str, Any]]) -> None:
    assert same(results[0]["normed"], truth(normed(), samples(10)))
    assert not same(truth(normed(1), samples(10)), truth(normed(), samples(10)))  # else this shows nothing
    assert all(r["mean after"] == [0.0] * 5 and r["passes through the wrapper"] == 0 for r in results)


def test_buffers_stay_apart_where_the_wrapper_leaves_them_apart(results: list[dict[str, Any]]) -> None:
    assert [r["own mean"] for r in results] == [0.0, 3.0, 6.0]
