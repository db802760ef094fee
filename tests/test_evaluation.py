"""Exact evaluation: each sample once, for any size and any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

from ddp_helpers import launch
from ddp_helpers.data import BatchedDataset, shard
from ddp_helpers.evaluation import (
    EarlyStopping,
    Evaluation,
    class_accuracy,
    confusion_matrix,
    evaluate,
    in_dataset_order,
    reduce_sums,
)
from ddp_helpers.process_group import rank, setup, teardown, world_size

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


# The metrics, on 1 to 4 ranks


def scores(n: int) -> Tensor:
    """Return n given values: large ones, so that a sum in float32 would be off, and small ones."""
    generator = torch.Generator().manual_seed(n)
    return torch.rand(n, generator=generator, dtype=torch.float64) * torch.tensor([1e9, 1.0]).repeat(n)[:n]


def guesses_and_labels(n: int) -> tuple[Tensor, Tensor]:
    data = samples(n)
    return data.images.argmax(1), data.labels


def counted_by_hand(n: int) -> Tensor:
    matrix = torch.zeros(5, 5, dtype=torch.int64)
    for guess, label in zip(*map(Tensor.tolist, guesses_and_labels(n)), strict=True):
        matrix[label, guess] += 1
    return matrix


def message_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the text of the ValueError that a call raises, "no error" if none."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def calls_until_stop(losses: Sequence[float], patience: int = 2) -> int:
    stop = EarlyStopping(patience)
    return next((call for call, loss in enumerate(losses, 1) if stop(loss)), 0)


def metrics_on_each_rank(_: int) -> dict[str, Any]:
    """Compute every metric for every size; then make each mistake on the last rank alone."""
    setup()
    r, size = rank(), world_size()
    last = r == size - 1
    found: dict[str, Any] = {}
    for n in SIZES:
        mine = torch.tensor(shard(n, r, size), dtype=torch.int64)
        guesses, labels = (values[mine] for values in guesses_and_labels(n))
        matrix = confusion_matrix(guesses, labels, 5)
        values = {"sum": scores(n)[mine].sum(), "right": (guesses == labels).sum(), "count": len(mine)}
        found[f"n={n}"] = {
            "sums": reduce_sums(dict(reversed(values.items())) if last else values),
            "matrix": matrix,
            "evaluation": evaluate(Table(), samples(n), 4),
            "rows": [
                in_dataset_order(rows, n) for rows in (scores(n)[mine], samples(n).images[mine], guesses, mine % 2 == 0)
            ],
        }
    found["types"] = reduce_sums({"int": 2**62 if r == 0 else 1, "mixed": 0.5 if last else 0, "nan": float("nan")})
    one, two = torch.tensor([1]), torch.tensor([2])
    mine = torch.zeros(len(shard(10, r, size)))
    found["faults"] = [
        message_of(reduce_sums, {"loss": 1.0, "lost" if last else "right": 1}),
        message_of(reduce_sums, {"loss": 1.0} if last else {"loss": 1.0, "right": 1}),
        message_of(reduce_sums, {"loss": torch.ones(2) if last else 1.0}),
        message_of(confusion_matrix, two if last else one, one, 2),
        message_of(confusion_matrix, one, -one if last else one, 2),
        message_of(confusion_matrix, torch.cat([one, one]) if last else one, one, 2),
        message_of(in_dataset_order, mine[1:] if last else mine, 10),
        message_of(in_dataset_order, mine.double() if last else mine, 10),
        message_of(in_dataset_order, mine.reshape(-1, 1) if last else mine, 10),
    ]
    falling = [5.0, 4.0, 4.0, 3.0, 2.0, 2.0, float("nan"), 1.0]
    own = [9.0, 9.0, 9.0, 9.0] if last else falling
    found["stops"] = calls_until_stop(falling), calls_until_stop(own), calls_until_stop([3.0, 2.0, 1.0])
    teardown()
    return found


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def metrics(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(metrics_on_each_rank, (), nprocs=request.param, timeout=60)


def test_any_number_of_ranks_evaluates_each_sample_once(metrics: list[dict[str, Any]]) -> None:
    for n in SIZES:
        assert all(same(found[f"n={n}"]["evaluation"], truth(Table(), samples(n))) for found in metrics), n


def test_sums_are_those_of_one_process(metrics: list[dict[str, Any]]) -> None:
    for n in SIZES:
        guesses, labels = guesses_and_labels(n)
        for found in metrics:
            sums = found[f"n={n}"]["sums"]
            assert list(sums) == (["count", "right", "sum"] if len(metrics) == 1 else ["sum", "right", "count"])
            assert (sums["right"], sums["count"]) == (int((guesses == labels).sum()), n)
            assert sums["sum"] == pytest.approx(math.fsum(scores(n).tolist()), rel=1e-12, abs=0)


def test_integers_stay_integers_and_floats_float64(metrics: list[dict[str, Any]]) -> None:
    for found in metrics:
        assert found["types"]["int"] == 2**62 + len(metrics) - 1  # float64 would lose the ones
        assert found["types"]["mixed"] == 0.5 and math.isnan(found["types"]["nan"])


def test_confusion_matrices_are_counted_by_hand(metrics: list[dict[str, Any]]) -> None:
    for n in SIZES:
        for found in metrics:
            assert found[f"n={n}"]["matrix"].dtype == torch.int64
            assert torch.equal(found[f"n={n}"]["matrix"], counted_by_hand(n))


def test_rows_come_in_dataset_order(metrics: list[dict[str, Any]]) -> None:
    for n in SIZES:
        whole = [scores(n), samples(n).images, guesses_and_labels(n)[0], torch.arange(n) % 2 == 0]
        for found in metrics:
            for rows, expected in zip(found[f"n={n}"]["rows"], whole, strict=True):
                assert rows.dtype == expected.dtype and torch.equal(rows, expected)


def test_a_fault_of_one_rank_is_an_error_on_all(metrics: list[dict[str, Any]]) -> None:
    last, alone = len(metrics) - 1, len(metrics) == 1
    rows = len(shard(10, last, len(metrics)))
    expected = [
        "no error"
        if alone
        else f"rank {last} lacks 'right' and has 'lost' in addition: the metrics of rank 0 are 'loss', 'right'",
        "no error" if alone else f"rank {last} lacks 'right': the metrics of rank 0 are 'loss', 'right'",
        f"rank {last} has no number under 'loss': RuntimeError: a Tensor with 2 elements cannot be converted to Scalar",
        f"rank {last} has the guess 2: classes are 0 to 1",
        f"rank {last} has the label -1: classes are 0 to 1",
        f"rank {last} has 2 guesses for 1 labels",
        f"rank {last} has {rows - 1} rows for the {rows} samples of its shard",
        "no error"
        if alone
        else f"rank {last} has rows of shape [], torch.float64, and rank 0 of shape [], torch.float32",
        "no error"
        if alone
        else f"rank {last} has rows of shape [1], torch.float32, and rank 0 of shape [], torch.float32",
    ]
    for found in metrics:
        assert found["faults"] == expected


def test_all_ranks_stop_at_the_same_call(metrics: list[dict[str, Any]]) -> None:
    assert [found["stops"] for found in metrics] == [(7, 3, 0)] * len(metrics)


def test_class_accuracy() -> None:
    matrix = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    found = class_accuracy(matrix)
    assert found.dtype == torch.float64 and found[[0, 2]].tolist() == [0.75, 0.0] and math.isnan(found[1])


def test_early_stopping_counts_from_the_best_loss() -> None:
    assert calls_until_stop([1.0, 1.0, 1.0]) == 3  # equal is not better
    assert calls_until_stop([3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0]) == 7
    assert calls_until_stop([1.0, 5.0, 4.0]) == 3  # less than the last is not less than the best
    assert calls_until_stop([float("nan")] * 3) == 2
    assert calls_until_stop([2.0, 1.5], patience=1) == 0
