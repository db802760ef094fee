"""When data, forward, backward, each bucket's all-reduce and the optimizer ran, on each rank (needs torch alone)."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
PHASES = ("data", "forward", "backward", "communication", "waiting", "optimizer")


class Span(NamedTuple):
    """Something that lasted from `start` to `end`, in seconds on the clock that all ranks of a machine share.

    `name` is data, forward (with the loss), backward, bucket or optimizer. A bucket lasts from the moment its last
    gradient was ready to the end of its all-reduce; `bucket` counts them from 0 in a step, `bytes` is its size.
    """

    name: str
    start: float
    end: float
    step: int
    bucket: int = -1
    bytes: int = 0


class Timeline:
    """Record the training steps of a model on this rank, from the first forward pass after `Timeline(model, …)`.

    Iterate over `timeline.batches(loader)` to see the data too. A DDP model's buckets are seen by a communication
    hook that averages as DDP does; a model can have one such hook in its life, so make the timeline once for each
    wrap. On a GPU the times are those of the device, read from events. No rank needs the others for recording.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.on = True  # set it to False to record nothing for a while
        self._marks: list[tuple[str, Any, Any, int, int, int]] = []
        self._step, self._buckets = -1, 0
        self._began: dict[str, Any] = {}
        cuda = next(model.parameters()).is_cuda
        self._now = _event if cuda else time.perf_counter
        self._base = (_event(), time.perf_counter()) if cuda else None
        if cuda:
            torch.cuda.synchronize()
        model.register_forward_pre_hook(self._forward_begins)
        model.register_forward_hook(self._forward_ends)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._reduce)
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self._end("optimizer"))

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader`, and record how long each batch was waited for."""
        iterator, done = iter(loader), object()
        while True:
            start = self._now()
            batch = next(iterator, done)
            if batch is done:
                return
            if self.on:
                self._marks.append(("data", start, self._now(), self._step + 1, -1, 0))
            yield batch  # type: ignore[misc]

    def spans(self) -> list[Span]:
        """Return what was recorded so far, in order of the starts; waits for the GPU, if there is one."""
        if self._base:
            torch.cuda.synchronize()
        found = [Span(name, self._read(start), self._read(end), *rest) for name, start, end, *rest in self._marks]
        return sorted(found, key=lambda span: span.start)

    def clear(self) -> None:
        """Forget what was recorded; the next step is step 0."""
        self._marks.clear()
        self._step = -1

    def _read(self, mark: Any) -> float:
        return self._base[1] + self._base[0].elapsed_time(mark) / 1e3 if self._base else mark

    def _begin(self, name: str) -> None:
        self._began[name] = self._now() if self.on else None

    def _end(self, name: str) -> None:
        if self._began.get(name) is not None:
            self._marks.append((name, self._began[name], self._now(), self._step, -1, 0))
            self._began[name] = None

    def _forward_begins(self, *_: Any) -> None:
        self._step += self.on
        self._buckets = 0
        self._begin("forward")

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs:  # the loss follows: backward begins when the first gradient of the output is there
            outputs[0].register_hook(self._backward_begins)
        else:
            self._end("forward")

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._end("forward")
        self._begin("backward")
        # at the end of this backward pass, before DDP's own callback waits for the buckets
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end("backward"))

    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        start, number, size = self._now(), self._buckets, bucket.buffer().nbytes
        self._buckets += 1
        step, on = self._step, self.on

        def done(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if on:
                self._marks.append(("bucket", start, self._now(), step, number, size))
            return future.value()

        return allreduce_hook(None, bucket).then(done)  # type: ignore[arg-type]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def phases(ranks: Sequence[Sequence[Span]]) -> list[dict[str, float]]:
    """Return the mean milliseconds per step that each rank spent on each phase; `ranks` are all ranks' spans.

    After backward a rank may wait for its buckets: as long as another rank has not sent its last one that is
    waiting, from then on it is communication. What backward hides counts as backward.
    """
    sent: dict[int, float] = {}  # step -> when the last rank sent its last bucket
    for spans in ranks:
        for step, last in _last_buckets(spans).items():
            sent[step] = max(sent.get(step, 0.0), last.start)
    result = []
    for spans in ranks:
        steps = max((span.step for span in spans), default=-1) + 1
        times = dict.fromkeys(PHASES, 0.0)
        for span in spans:
            if span.name in times:
                times[span.name] += span.end - span.start
        ends = {span.step: span.end for span in spans if span.name == "backward"}
        for step, last in _last_buckets(spans).items():
            ready = ends.get(step, last.start)
            exposed = max(0.0, last.end - ready)
            times["waiting"] += (wait := min(exposed, max(0.0, sent[step] - ready)))
            times["communication"] += exposed - wait
        result.append({name: 1e3 * seconds / max(1, steps) for name, seconds in times.items()})
    return result


def _last_buckets(spans: Iterable[Span]) -> dict[int, Span]:
    last: dict[int, Span] = {}
    for span in spans:
        if span.name == "bucket" and (span.step not in last or span.end > last[span.step].end):
            last[span.step] = span
    return last


def chrome_trace(ranks: Sequence[Sequence[Span]], path: str | Path) -> None:
    """Write all ranks' spans as a file for chrome://tracing or ui.perfetto.dev: a process for each rank."""
    begin = min((span.start for spans in ranks for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for span in spans:
            name, row = (f"bucket {span.bucket}", "all-reduce") if span.name == "bucket" else (span.name, "compute")
            when = {"ts": 1e6 * (span.start - begin), "dur": 1e6 * (span.end - span.start)}
            args = {"step": span.step, **({"bytes": span.bytes} if span.bytes else {})}
            events.append({"ph": "X", "name": name, "pid": rank, "tid": row, **when, "args": args})
    Path(path).write_text(json.dumps({"traceEvents": events}))
