"""One loader per rank: the shard is right, no two passes or streams are alike, and all of it is reproducible."""

from __future__ import annotations

import itertools
import math
import warnings

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import Rectangle
from torch.utils.data import Dataset, DistributedSampler

from ddp_helpers import show
from ddp_helpers.data import BatchedDataset
from ddp_helpers.sampling import EpochSampler, make_loader, stream_seed


class Noise(Dataset[torch.Tensor]):
    """Index and a random number, as a random augmentation would draw it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


def orders(rank: int, world_size: int = 2, passes: int = 2, n: int = 10, batch: int = 3, **options) -> list[list[int]]:
    loader = make_loader(list(range(n)), batch, rank, world_size, **options)  # type: ignore[arg-type]
    return [[int(i) for batch in loader for i in batch] for _ in range(passes)]


@pytest.mark.parametrize(("n", "world_size"), [(10, 1), (10, 2), (10, 3), (10, 4), (2, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_ranks_cover_the_data_in_equal_parts(n: int, world_size: int, shuffle: bool) -> None:
    ranks = [orders(rank, world_size, 1, n, shuffle=shuffle)[0] for rank in range(world_size)]
    assert {len(part) for part in ranks} == {math.ceil(n / world_size)}
    assert set(itertools.chain(*ranks)) == set(range(n))


def test_drop_last_repeats_nothing_and_makes_whole_batches() -> None:
    ranks = [orders(rank, 3, 1, 14, drop_last=True)[0] for rank in range(3)]  # shards of 4, batches of 3
    assert [len(part) for part in ranks] == [3, 3, 3]
    assert len(set(itertools.chain(*ranks))) == 9


def test_each_pass_has_its_own_order_the_same_in_every_run() -> None:
    first, second = orders(0)
    assert first != second and orders(0) == [first, second]
    assert orders(0, seed=1)[0] != first
    assert set(orders(0)[1] + orders(1)[1]) == set(range(10))


def test_a_run_can_begin_at_a_later_epoch() -> None:
    loader = make_loader(list(range(10)), 3, 0, 2)  # type: ignore[arg-type]
    loader.epoch = 1
    assert [int(i) for batch in loader for i in batch] == orders(0)[1]


def test_a_look_at_the_first_batch_on_one_rank_keeps_the_ranks_together() -> None:
    loader = make_loader(list(range(10)), 3, 0, 2)  # type: ignore[arg-type]
    next(iter(loader))
    assert loader.epoch == 0
    assert [int(i) for batch in loader for i in batch] == orders(0)[0]
    assert loader.epoch == 1


def test_a_pass_that_is_left_early_counts() -> None:
    loader = make_loader(list(range(10)), 3, 0, 2)  # type: ignore[arg-type]
    for step, _ in enumerate(loader):
        if step == 1:  # two batches were all there is: the loader can't know that the loop is done
            break
    assert [int(i) for batch in loader for i in batch] == orders(0)[1]
    assert orders(0, passes=3, batch=5)[1] != orders(0, passes=3, batch=5)[2]  # one batch is a whole pass


def test_a_plain_loop_is_warned_when_it_repeats_an_order() -> None:
    sampler = EpochSampler(range(10), 2, 0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler)
        sampler.set_epoch(1)
        list(sampler)
        unshuffled = EpochSampler(range(10), 2, 0, shuffle=False)  # type: ignore[arg-type]
        assert list(unshuffled) == list(unshuffled)
    with pytest.warns(UserWarning, match=r"call sampler.set_epoch\(epoch\) before each epoch.*still 1"):
        list(sampler)


def draws(seed: int = 0, rank: int = 0, passes: int = 2, workers: int = 2) -> list[float]:
    loader = make_loader(Noise(), 3, rank, 2, seed=seed, num_workers=workers)
    loader.multiprocessing_context = "fork" if workers else None
    return [value for _ in range(passes) for batch in loader for value in batch[:, 1].tolist()]


def test_workers_draw_apart_and_the_same_in_every_run() -> None:
    runs = [draws(seed, rank) for seed, rank in [(0, 0), (0, 1), (1, 0)]]
    everything = list(itertools.chain(*runs))
    assert len(set(everything)) == len(everything) == 36
    assert draws(0, 1) == runs[1]


def test_loading_leaves_the_trainings_own_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    draws()
    assert torch.equal(torch.rand(2), expected)


def test_stream_seeds_never_meet() -> None:
    seeds = [stream_seed(*key) for key in itertools.product(range(4), repeat=4)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**63
    assert stream_seed(0, 1) != stream_seed(1, 0)
    assert stream_seed(0, 1) == 6015636589008938256  # in every version of the package


def test_the_order_is_that_of_a_plain_distributed_sampler() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(10), 2, 1, seed=5)  # type: ignore[arg-type]
    for epoch, order in enumerate(orders(1, seed=5)):
        sampler.set_epoch(epoch)
        assert order == list(sampler)


def test_the_data_sets_own_collate_is_used() -> None:
    data = BatchedDataset(torch.zeros(8, 28, 28, dtype=torch.uint8), torch.arange(8))
    images, labels = next(iter(make_loader(data, 4, 0, 2)))
    assert images.shape == (4, 1, 28, 28) and len(labels) == 4


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        make_loader(Noise(), 3, 2, 2)


@pytest.mark.parametrize(
    ("dealt", "n", "hatched", "dotted"),
    [
        ([[[0, 2], [4]], [[1, 3], [0]]], 5, 1, 0),  # padded
        ([[[0, 2]], [[1, 3]]], 5, 0, 1),  # one dropped
        ([[[0, 0]], [[0, 1]]], 3, 2, 1),
        ([[] for _ in range(10)], 0, 0, 0),  # more ranks than colours, and no data
    ],
)
def test_the_grid_marks_what_is_repeated_and_what_is_dropped(
    dealt: list[list[list[int]]], n: int, hatched: int, dotted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    show.sampler_grid(dealt, n)
    figure = plt.gcf()
    cells = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert sum(cell.get_hatch() is not None for cell in cells) == hatched
    assert sum(cell.get_linestyle() == ":" for cell in cells) == dotted
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert ("once more" in words, "nobody" in words) == (hatched > 0, dotted > 0)
    assert all(f"rank {rank}" in words for rank in range(len(dealt)))
    plt.close(figure)
