"""The timeline records what happened, in the right order and on one clock, and changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import launch
from ddp_helpers.models import MLP
from ddp_helpers.timeline import PHASES, Span, Timeline, chrome_trace, phases

STEPS = 4


def train(rank: int, traced: bool, slow_rank: int = -1, accumulate: bool = False):
    """Train a model of three buckets; return losses, spans and the bucket sizes of DDP's own log."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(400, 400) for _ in range(6)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    timeline = Timeline(model, optimizer) if traced else None
    torch.manual_seed(rank)
    data, losses = [torch.randn(8, 400) for _ in range(STEPS)], []
    for step, batch in enumerate(timeline.batches(data) if timeline else data):
        local = accumulate and step % 2 == 0
        with model.no_sync() if local else contextlib.nullcontext():
            loss = model(batch).square().mean()
            if rank == slow_rank:
                time.sleep(0.2)
            loss.backward()
        if not local:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    log = model._get_ddp_logging_data()
    sizes = [int(size) for size in log.get("rebuilt_bucket_sizes", log["bucket_sizes"]).split(", ")]
    dist.destroy_process_group()
    return losses, timeline.spans() if timeline else [], sizes


@pytest.fixture(scope="module")
def traced():
    return launch(train, (True,))


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_recording_changes_no_bit(traced) -> None:
    assert [losses for losses, _, _ in launch(train, (False,))] == [losses for losses, _, _ in traced]


def test_each_phase_is_recorded_once_in_each_step(traced) -> None:
    for _, spans, _ in traced:
        for name in ("data", "forward", "backward", "optimizer"):
            assert [span.step for span in named(spans, name)] == list(range(STEPS)), name
        compute = [span for span in spans if span.name != "bucket"]
        assert [span.name for span in compute[:8]] == ["data", "forward", "backward", "optimizer"] * 2
        assert all(a.end <= b.start for a, b in itertools.pairwise(compute))


def test_each_bucket_is_recorded_with_its_bytes(traced) -> None:
    for _, spans, sizes in traced:
        last = [span for span in named(spans, "bucket") if span.step == STEPS - 1]
        assert len(sizes) > 1 and [span.bytes for span in last] == sizes
        assert [span.bucket for span in last] == list(range(len(sizes)))
        assert sum(span.bytes for span in last) == 4 * sum(p.numel() for p in nn.Linear(400, 400).parameters()) * 6


def test_a_bucket_begins_within_backward_and_ends_before_the_optimizer(traced) -> None:
    for _, spans, _ in traced:
        for step in range(STEPS):
            (backward,), (optimizer,) = (
                [s for s in named(spans, n) if s.step == step] for n in ("backward", "optimizer")
            )
            for bucket in [span for span in named(spans, "bucket") if span.step == step]:
                assert backward.start <= bucket.start <= backward.end
                assert bucket.start < bucket.end <= optimizer.start


def test_the_ranks_share_a_clock(traced) -> None:
    for step in range(STEPS):
        buckets = [[s for s in named(spans, "bucket") if s.step == step] for _, spans, _ in traced]
        for a, b in zip(*buckets, strict=True):  # no all-reduce ends before both ranks have begun it
            assert min(a.end, b.end) >= max(a.start, b.start)


def test_a_slow_rank_makes_the_other_wait() -> None:
    fast, slow = phases([spans for _, spans, _ in launch(train, (True, 1))])
    assert fast["waiting"] > slow["waiting"]
    assert slow["forward"] >= 200  # the loss belongs to forward


def test_no_sync_steps_have_no_bucket() -> None:
    for _, spans, _ in launch(train, (True, -1, True)):
        assert {span.step for span in named(spans, "bucket")} == {1, 3}
        assert [span.step for span in named(spans, "backward")] == [0, 1, 2, 3]
        assert [span.step for span in named(spans, "optimizer")] == [1, 3]


def test_it_works_on_a_bare_model_and_can_pause() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timeline = Timeline(model, optimizer)
    batches = [torch.zeros(2, 1, 28, 28)] * 3
    for step, images in enumerate(timeline.batches(batches)):
        timeline.on = step != 1
        model(images).sum().backward()
        optimizer.step()
    assert [span.name for span in timeline.spans() if span.name != "data"] == ["forward", "backward", "optimizer"] * 2
    assert {span.step for span in named(timeline.spans(), "forward")} == {0, 1}
    timeline.clear()
    with torch.no_grad():
        model(batches[0])
    assert [(span.name, span.step) for span in timeline.spans()] == [("forward", 0)]


SPANS = [
    [Span("forward", 0, 1, 0), Span("backward", 1, 3, 0), Span("bucket", 2, 4, 0, 0, 8), Span("bucket", 3, 8, 0, 1, 4)],
    [Span("forward", 0, 2, 0), Span("backward", 2, 6, 0), Span("bucket", 3, 4, 0, 0, 8), Span("bucket", 6, 8, 0, 1, 4)],
]


def test_phases_tell_waiting_from_communication() -> None:
    first, second = phases(SPANS)
    nothing = dict.fromkeys(PHASES, 0.0)
    assert first == {**nothing, "forward": 1000, "backward": 2000, "waiting": 3000, "communication": 2000}
    assert second == {**nothing, "forward": 2000, "backward": 4000, "communication": 2000}
    assert phases([[]]) == [nothing]


def test_phases_are_means_per_step() -> None:
    spans = [Span("data", 0, 1, 0), Span("data", 2, 5, 1)]
    assert phases([spans])[0]["data"] == 2000


def test_chrome_trace_holds_every_span(tmp_path: Path) -> None:
    chrome_trace(SPANS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8 and {event["pid"] for event in spans} == {0, 1}
    bucket = next(event for event in spans if event["name"] == "bucket 1")
    assert (bucket["ts"], bucket["dur"], bucket["tid"]) == (3e6, 5e6, "all-reduce")
    assert bucket["args"] == {"step": 0, "bytes": 4}
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
