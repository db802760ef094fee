"""Run a pytest test on ranks, with a deadline: it fails where it would hang (needs launcher/ beside it)."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from .launcher import RankError, TravelError, launch, travel

OURS = ("rank", "world_size")
OUTCOMES: dict[str, Callable[[str], Any]] = {"Skipped": pytest.skip, "XFailed": pytest.xfail}


def on_ranks(nprocs: int = 2, *, timeout: float | None = 60.0, backend: str | None = "gloo") -> Callable[..., Any]:
    """Run the decorated test on `nprocs` fresh ranks, each in an initialised process group.

    The test may ask for `rank` and `world_size`; other arguments are fixtures or parameters, made once in the test
    process and copied to every rank. It passes when it passes on every rank, and fails with the first rank's assertion,
    or after `timeout` seconds without a sign of life with a report of where each rank is. `pytest.skip` and
    `pytest.xfail` work on a rank. `backend=None` leaves the process group to the test. Put it next to the function,
    below `pytest.mark`. Raises TypeError for a test that pytest could not call.
    """
    if callable(nprocs):
        raise TypeError("write @on_ranks(2), with the number of ranks")

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test):
            raise TypeError(f"{test.__name__} must be a plain function: it runs once on every rank")
        parameters = inspect.signature(test).parameters.values()
        wants = [p.name for p in parameters if p.name in OURS]

        @functools.wraps(test)
        def run(*instance: Any, **arguments: Any) -> None:
            __tracebackhide__ = True
            kind, text = "", ""
            try:
                for name, value in arguments.items():
                    text = f"the fixture or parameter '{name}' can't be sent to a rank"
                    travel.dumps(value)
                launch(_on_a_rank, (test, wants, instance, arguments, backend), nprocs, timeout=timeout)
            except TravelError as error:
                kind, text = "TravelError", f"{text}: {error}"
            except RankError as error:
                kind, text = error.type or "HangError", f"{error}\n{error.__cause__}"
            if kind in OUTCOMES:
                OUTCOMES[kind](text.partition("\n")[0])
            elif kind:
                pytest.fail(text, pytrace=False)

        del run.__wrapped__  # type: ignore[attr-defined]  # pytest reads the signature, and must not see our arguments
        run.__signature__ = inspect.Signature([p for p in parameters if p.name not in OURS])  # type: ignore[attr-defined]
        return run

    return decorate


def _on_a_rank(
    rank: int,
    test: Callable[..., Any],
    wants: list[str],
    instance: tuple[Any, ...],
    arguments: dict[str, Any],
    backend: str | None,
) -> None:
    if backend is not None:
        dist.init_process_group(backend)
        dist.barrier()  # a test that one rank finishes at once must not look like a failed start of the others
    values = {"rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    test(*instance, **arguments, **{name: values[name] for name in wants})
    if backend is not None and dist.is_initialized():
        dist.destroy_process_group()
