"""The benchmark measures what its table says: pairs in turn, medians, limits, and rows that work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests import bench
from tests.bench import SMALL, Missing, Pair, Row, rows


def row_of(ours: list[float], reference: list[float], **limits: float) -> Row:
    """Return a row whose measurements are given."""

    def measure(_: bench.Size) -> Iterator[Pair]:
        first, second = iter(ours), iter(reference)
        yield Pair(lambda: next(first), (lambda: next(second)) if reference else None)

    return Row("a / b", measure, **limits)


def test_ours_and_the_reference_take_turns_between_start_and_end() -> None:
    calls: list[str] = []

    def measure(size: bench.Size) -> Iterator[Pair]:
        calls.append("start")
        yield Pair(lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 1.0)
        calls.append("end")

    bench.run(Row("a / b", measure), 3, SMALL)
    assert calls == ["start", "a", "b", "a", "b", "a", "b", "end"]


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    result = bench.run(row_of([1, 4, 9], [1, 2, 3]), 3, SMALL)  # ratios 1, 2, 3
    assert (result.ours, result.reference, result.ratio) == (4, 2, 2)
    assert result.all_ours == [1, 4, 9]
    result = bench.run(row_of([1, 6, 9], [1, 2, 30]), 3, SMALL)  # ratios 1, 3, 0.3; the medians' would be 3
    assert (result.ours, result.reference, result.ratio) == (6, 2, 1)


@pytest.mark.parametrize(
    ("limits", "limit", "verdict"),
    [
        ({}, "", ""),
        ({"limit": 2.0}, "2", "ok"),
        ({"limit": 1.99}, "1.99", "OVER"),
        ({"limit_ms": 4.0}, "4 ms", "ok"),
        ({"limit_ms": 3.9}, "3.9 ms", "OVER"),
    ],
)
def test_limits(limits: dict[str, float], limit: str, verdict: str) -> None:
    result = bench.run(row_of([0.004], [0.002], **limits), 1, SMALL)
    assert (result.limit, result.verdict) == (limit, verdict)


def test_without_a_reference_our_own_limit_still_holds() -> None:
    result = bench.run(row_of([0.004], [], limit_ms=3.0), 1, SMALL)
    assert (result.reference, result.ratio, result.verdict) == (None, None, "OVER")


def missing(_: bench.Size) -> Iterator[Pair]:
    raise Missing("it is not installed")
    yield


def test_the_table_is_aligned_and_ends_with_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of([1.5], [3.0], limit=1.15), Row("something else / b", missing, limit_ms=5)]
    bench.table(rows, 1, SMALL)
    assert capsys.readouterr().out == (
        "ours / reference         ours  reference      ratio      limit\n"
        "a / b                  1.50 s     3.00 s       0.50       1.15  ok\n"
        "something else / b          -          -          -       5 ms  skipped\n"
        "\n"
        "it is not installed\n"
        "    something else / b\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.9997, "1.00 s"),
        (0.297, "297 ms"),
        (0.0123, "12.3 ms"),
        (0.00045, "0.450 ms"),
    ],
)
def test_durations_have_units(value: float | None, text: str) -> None:
    assert bench.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0123, "0.012"), (0.09, "0.090"), (0.3, "0.30"), (1.149, "1.15"), (1413.2, "1413")],
)
def test_ratios_keep_their_digits(value: float | None, text: str) -> None:
    assert bench.cells(bench.Result("a / b", ratio=value))[2] == text


def test_the_command_prints_saves_and_fails_when_a_row_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    over, fine = row_of([3, 3], [1, 1], limit=2.0), Row("fine / b", row_of([1, 1], [1, 1]).measure, limit=2.0)
    monkeypatch.setattr(bench, "ROWS", [over, fine])
    file = tmp_path / "bench.json"
    assert bench.main(["--pairs", "2", "--json", str(file)]) == 1
    saved = json.loads(file.read_text())
    assert saved["pairs"] == 2
    assert [(r["name"], r["ratio"], r["verdict"]) for r in saved["rows"]] == [
        ("a / b", 3, "OVER"),
        ("fine / b", 1, "ok"),
    ]
    assert saved["rows"][0]["all_reference"] == [1, 1]
    assert {"python", "torch", "cores", "load_before", "load_after"} <= set(saved["machine"])
    assert "load_after" in capsys.readouterr().out
    assert bench.main(["fine", "--pairs", "1"]) == 0
    assert "a / b" not in capsys.readouterr().out
    for wrong in (["nothing is called so"], ["--pairs", "0"]):
        with pytest.raises(SystemExit):
            bench.main(wrong)


@pytest.mark.parametrize("one", bench.ROWS, ids=[one.name for one in bench.ROWS])
def test_each_row_measures(one: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipyparallel", None)  # its engines take seconds; import raises
    before = sys.modules["__main__"], hasattr(sys, "ps1")
    result = bench.run(one, 1, SMALL)
    assert (sys.modules["__main__"], hasattr(sys, "ps1")) == before
    assert result.ours is not None and result.ours > 0
    if "ipyparallel" in one.name:
        assert (result.ratio, result.note) == (None, rows.NO_IPYPARALLEL)
    else:
        assert result.ratio is not None and result.ratio > 0


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in bench.ROWS if "ipyparallel" in one.name], ids=lambda one: one.name)
def test_against_ipyparallel(one: Row) -> None:
    pytest.importorskip("ipyparallel", reason=rows.NO_IPYPARALLEL)
    result = bench.run(one, 1, SMALL)
    assert result.ratio is not None and result.ratio > 0
