"""Reducing, comparing and judging, against plain definitions."""

import math
import statistics
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.changes.errors import BadArgument
from chaosgpu.observe.errors import NoValue
from chaosgpu.observe.series import Series
from chaosgpu.observe.verdict import (
    OPERATORS,
    Condition,
    Reading,
    changed,
    judge,
    judge_window,
    number,
    quantile,
    reducer,
)

FINITE = st.floats(-1e9, 1e9)
SOME = st.lists(FINITE, min_size=1, max_size=12)
OPS = st.sampled_from(sorted(OPERATORS))
REDUCES = st.sampled_from(["all", "any", "one", "min", "max", "avg", "sum", "count", "quantile 0.9"])


def vector(*values: float) -> tuple[Series, ...]:
    return tuple(Series({"rank": str(rank)}, ((1.0, value),)) for rank, value in enumerate(values))


def condition(op: str, value: float, **reading: Any) -> Condition:
    return Condition(op, value, Reading(**{"reduce": "all", **reading}))


@settings(deadline=None)
@given(SOME)
def test_reductions_are_what_they_are_called(values: list[float]) -> None:
    found = {word: number(vector(*values), Reading(word)) for word in ("min", "max", "avg", "sum", "count")}
    assert found["min"] == min(values)
    assert found["max"] == max(values)
    assert found["sum"] == pytest.approx(math.fsum(values), abs=1e-3)
    assert found["avg"] == pytest.approx(statistics.fmean(values), abs=1e-3)
    assert found["count"] == len(values)


@settings(deadline=None)
@given(st.lists(FINITE, min_size=2, max_size=12))
def test_quantiles_are_those_of_inclusive_statistics(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    for tenth, cut in enumerate(cuts, 1):
        assert quantile(tenth / 10, values) == pytest.approx(cut, abs=1e-5)
    assert (quantile(0, values), quantile(1, values)) == (min(values), max(values))


@settings(deadline=None)
@given(SOME, OPS, FINITE)
def test_all_and_any_are_each_compared(values: list[float], op: str, limit: float) -> None:
    met = [OPERATORS[op](value, limit) for value in values]
    assert judge(vector(*values), condition(op, limit)).holds is all(met)
    assert judge(vector(*values), condition(op, limit, reduce="any")).holds is any(met)


@settings(deadline=None)
@given(SOME, OPS, FINITE, REDUCES)
def test_a_verdict_is_a_bool_with_one_line(values: list[float], op: str, limit: float, reduce: str) -> None:
    verdict = judge(vector(*values), condition(op, limit, reduce=reduce))
    assert type(verdict.holds) is bool
    assert verdict.reason
    assert "\n" not in verdict.reason
    assert len(verdict.reason) < 1000


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=8), st.integers(0, 8), OPS, FINITE, REDUCES)
def test_nan_never_holds_unless_it_is_said_what_it_means(
    values: list[float], where: int, op: str, limit: float, reduce: str
) -> None:
    values.insert(where, math.nan)
    assert not judge(vector(*values), condition(op, limit, reduce=reduce)).holds
    with pytest.raises(NoValue, match="is NaN"):
        number(vector(*values), Reading("max"))
    rest = [value for value in values if not math.isnan(value)]
    ignoring = condition(op, limit, reduce=reduce, on_nan="ignore")
    assert judge(vector(*values), ignoring).holds is judge(vector(*rest), ignoring).holds
    seven = condition(op, limit, reduce=reduce, on_nan=7.0)
    replaced = [7.0 if math.isnan(value) else value for value in values]
    assert judge(vector(*values), seven).holds is judge(vector(*replaced), seven).holds


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=8), st.sampled_from(["one", "min", "max", "avg", "sum", "count", "quantile 0.5"]))
def test_a_number_is_finite_or_none(values: list[float], reduce: str) -> None:
    with suppress(NoValue):
        assert math.isfinite(number(vector(*values), Reading(reduce)))


@pytest.mark.parametrize(("on_empty", "holds"), [("fail", False), ("pass", True), (5.0, True), (4.0, False)], ids=str)
def test_no_data(on_empty: Any, holds: bool) -> None:
    assert judge((), condition(">", 4.5, on_empty=on_empty)).holds is holds
    assert not judge((), condition(">", 4.5, on_empty=on_empty, min_series=1)).holds


def test_too_few_series() -> None:
    assert judge(vector(1, 2), condition(">", 0, min_series=2)).holds
    assert not judge(vector(1, 2), condition(">", 0, min_series=3)).holds
    assert not judge(vector(1, math.nan), condition(">", 0, min_series=2, on_nan="ignore")).holds


def test_one_is_one() -> None:
    assert number(vector(3), Reading()) == 3
    with pytest.raises(NoValue, match="2 samples, and one is wanted"):
        number(vector(3, 3), Reading())
    assert not judge(vector(3, 3), condition("==", 3, reduce="one")).holds


def test_infinite_samples_are_compared_and_never_returned() -> None:
    assert judge(vector(math.inf), condition(">", 5)).holds
    assert not judge(vector(math.inf, -math.inf), condition("!=", 5, reduce="sum")).holds
    with pytest.raises(NoValue, match="not a finite number"):
        number(vector(math.inf), Reading())


@pytest.mark.parametrize("reduce", ["", "mean", "quantile", "quantile 1.1", "quantile nan", "quantile 0.5 x", "p99"])
def test_words_for_reductions(reduce: str) -> None:
    with pytest.raises(BadArgument, match="reduce is "):
        reducer(reduce)


def matrix(start: int, **rows: list[float | None]) -> tuple[Series, ...]:
    return tuple(
        Series({"row": name}, tuple((float(start + at), value) for at, value in enumerate(row) if value is not None))
        for name, row in rows.items()
    )


def test_a_window_holds_at_every_step() -> None:
    above = condition(">", 0)
    assert judge_window(matrix(100, a=[1, 2, 3], b=[4, 5, 6]), above, 100, 102, 1).holds
    broken = judge_window(matrix(100, a=[1, 0, 3], b=[4, 5, 6]), above, 100, 102, 1)
    assert not broken.holds
    assert "00:01:41 UTC, 1 s before the end" in broken.reason


def test_a_gap_fails_where_no_data_does() -> None:
    gap = matrix(100, a=[1, None, 3], b=[4, 5, 6])
    assert not judge_window(gap, condition(">", 0), 100, 102, 1).holds
    assert (
        "no sample at 1 of 3 steps of 1 s, first at 00:01:41"
        in judge_window(gap, condition(">", 0, reduce="sum"), 100, 102, 1).reason
    )
    assert judge_window(gap, condition(">", 0, on_empty="pass"), 100, 102, 1).holds
    assert judge_window(gap, condition(">=", 1, reduce="count"), 100, 102, 1).holds
    assert not judge_window(gap, condition(">=", 2, reduce="count"), 100, 102, 1).holds
    assert not judge_window((), condition(">", 0), 100, 102, 1).holds
    assert judge_window((), condition(">", 0, on_empty="pass"), 100, 102, 1).holds
    late = matrix(101, a=[1, 2])
    assert not judge_window(late, condition(">", 0), 100, 102, 1).holds


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=20), OPS, FINITE, st.integers(1, 60))
def test_a_window_of_one_series_is_each_of_its_samples(values: list[float], op: str, limit: float, step: int) -> None:
    series = (Series({}, tuple((float(1000 + at * step), value) for at, value in enumerate(values))),)
    end = 1000 + (len(values) - 1) * step
    held = judge_window(series, condition(op, limit), 1000, end, step).holds
    assert held is all(OPERATORS[op](value, limit) for value in values)


@settings(deadline=None)
@given(FINITE, FINITE)
def test_change(before: float, now: float) -> None:
    assert changed(before, now, relative=False) == now - before
    if before == 0:
        with pytest.raises(NoValue):
            changed(before, now, relative=True)
    elif abs(before) > 1e-3:
        assert before + changed(before, now, relative=True) / 100 * abs(before) == pytest.approx(now, abs=1e-3)
