"""Whether series meet a condition, and why not. Pure: no server, no clock."""

import datetime
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaosgpu.changes.errors import BadArgument
from chaosgpu.observe.errors import NoValue
from chaosgpu.observe.series import Series, listed

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
FAIL, PASS, IGNORE = "fail", "pass", "ignore"


@dataclass(frozen=True)
class Verdict:
    """Whether it holds, and the reason in one line."""

    holds: bool
    reason: str


@dataclass(frozen=True)
class Reading:
    """How series become one number.

    :param reduce: ``one`` (there must be exactly one sample), ``min``, ``max``, ``avg``, ``sum``, ``count``,
        ``quantile Q`` with Q from 0 to 1; for a condition also ``all`` and ``any`` of the samples.
    :param on_empty: what no data means: ``fail``; ``pass``, for a condition only; or the number to take instead.
    :param on_nan: what a NaN sample means: ``fail``; ``ignore``: it does not count as data; or the number to take.
    :param min_series: fewer series than this are as bad as none, whatever ``on_empty`` says.
    """

    reduce: str = "one"
    on_empty: str | float = FAIL
    on_nan: str | float = FAIL
    min_series: int = 0


@dataclass(frozen=True)
class Condition:
    """A comparison that samples must meet."""

    op: str
    value: float
    reading: Reading

    def met_by(self, number: float) -> bool:
        return OPERATORS[self.op](number, self.value)


Point = tuple[str, float]  # whose sample, and its value
Reducer = Callable[[Sequence[float]], float]


def quantile(q: float, values: Sequence[float]) -> float:
    """The q-quantile with linear interpolation between the two nearest ranks, as PromQL's ``quantile`` has it."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = ordered[math.floor(rank)]
    high = ordered[math.ceil(rank)]
    return low if low == high else low * (1 - rank % 1) + high * (rank % 1)


REDUCERS: dict[str, Reducer] = {
    "min": min,
    "max": max,
    "avg": lambda values: sum(value / len(values) for value in values),
    "sum": lambda values: float(sum(values)),
    "count": lambda values: float(len(values)),
}


def reducer(reduce: str) -> Reducer | None:
    """The function that a word for it names, or None for ``one``, ``all`` and ``any``.

    :raises BadArgument: no such word.
    """
    if reduce in REDUCERS:
        return REDUCERS[reduce]
    if reduce in ("one", "all", "any"):
        return None
    word, _, text = reduce.partition(" ")
    try:
        q = float(text)
    except ValueError:
        q = math.nan
    if word != "quantile" or not 0 <= q <= 1:
        words = ", ".join(("one", "all", "any", *REDUCERS))
        raise BadArgument(f'reduce is {reduce[:60]!r}: one of {words}, or "quantile 0.9" is allowed')
    return lambda values: quantile(q, values)


def points(series: Sequence[Series], reading: Reading) -> list[Point]:
    """The samples that count, after what is said about NaN and about no data.

    Empty only where no data passes.

    :raises NoValue: a NaN, too few series, or no data, where that fails.
    """
    kept: list[Point] = []
    counted = 0
    for one in series:
        values = [value for _, value in one.samples]
        if any(map(math.isnan, values)):
            if reading.on_nan == FAIL:
                raise NoValue(f"{one.name or 'the result'} is NaN")
            if reading.on_nan == IGNORE:
                values = [value for value in values if not math.isnan(value)]
            else:
                values = [float(reading.on_nan) if math.isnan(value) else value for value in values]
        counted += bool(values)
        kept += [(one.name, value) for value in values]
    if counted < reading.min_series:
        raise NoValue(f"{counted} series have data, and at least {reading.min_series} must")
    if not kept:
        if reading.on_empty == FAIL:
            raise NoValue("no data: no series matches, none meets a comparison in the query, or a window is too short")
        if reading.on_empty != PASS:
            kept = [("no data", float(reading.on_empty))]
    return kept


def number(series: Sequence[Series], reading: Reading) -> float:
    """The one finite number that the series are reduced to.

    :raises NoValue: there is none, and why.
    """
    kept = points(series, reading)
    if not kept:
        raise NoValue("no data")
    function = reducer(reading.reduce)
    if function is None:
        if len(kept) > 1:
            names = listed(name for name, _ in kept)
            raise NoValue(f"{len(kept)} samples, and one is wanted: aggregate in the query, or give reduce ({names})")
        value = kept[0][1]
    else:
        value = function([value for _, value in kept])
    if not math.isfinite(value):
        raise NoValue(f"the value is {value}, and not a finite number")
    return value


def judge(series: Sequence[Series], condition: Condition) -> Verdict:
    """Whether the samples meet the condition now. An infinite sample is compared as such."""
    try:
        kept = points(series, condition.reading)
    except NoValue as error:
        return Verdict(False, str(error))
    wanted = f"{condition.op} {condition.value:g}"
    if not kept:
        return Verdict(True, "no data, which passes")
    reduce = condition.reading.reduce
    function = reducer(reduce)
    if function is not None:
        value = function([value for _, value in kept])
        if math.isnan(value):
            return Verdict(False, f"the {reduce} of {len(kept)} samples is NaN")
        holds = condition.met_by(value)
        return Verdict(holds, f"the {reduce} of {len(kept)} samples is {value:g}, {'as' if holds else 'not'} {wanted}")
    if reduce == "one" and len(kept) > 1:
        names = listed(name for name, _ in kept)
        return Verdict(False, f"{len(kept)} samples, and one is wanted: give reduce ({names})")
    met = [(name, value) for name, value in kept if condition.met_by(value)]
    unmet = [(name, value) for name, value in kept if not condition.met_by(value)]
    holds = bool(met) if reduce == "any" else not unmet
    told = listed(f"{name} {value:g}".strip() for name, value in (met if holds else unmet))
    if len(kept) == 1:
        return Verdict(holds, f"{told} is {'' if holds else 'not '}{wanted}")
    return Verdict(holds, f"{len(met)} of {len(kept)} samples are {wanted}; {'those' if holds else 'not'}: {told}")


def judge_window(series: Sequence[Series], condition: Condition, start: int, end: int, step: int) -> Verdict:
    """Whether the samples of a range query met the condition at each step from start to end, both included.

    Where no data fails, a series that is missing at a step fails too; unless series are counted, since then the count
    shows it.
    """
    times = range(start, end + 1, step)
    at: dict[int, list[Series]] = {time: [] for time in times}
    for one in series:
        for time, value in one.samples:
            if round(time) in at:
                at[round(time)].append(Series(one.labels, ((time, value),)))
    if condition.reading.on_empty == FAIL and condition.reading.reduce != "count":
        for one in series:
            present = {round(time) for time, _ in one.samples}
            gaps = [time for time in times if time not in present]
            if gaps:
                return Verdict(
                    False,
                    f"{one.name or 'the result'} has no sample at {len(gaps)} of {len(times)} steps "
                    f"of {step} s, first at {_clock(gaps[0])}",
                )
    for time in times:
        verdict = judge(at[time], condition)
        if not verdict.holds:
            return Verdict(False, f"at {_clock(time)}, {end - time} s before the end: {verdict.reason}")
    return Verdict(True, f"held for {end - start} s; at last: {verdict.reason}")


def changed(before: float, now: float, relative: bool) -> float:
    """How far a number went: the difference, or percent of the former number's size.

    :raises NoValue: percent of zero.
    """
    if not relative:
        return now - before
    if before == 0:
        raise NoValue("the baseline is 0, and percent of that mean nothing: compare by value")
    return 100 * (now - before) / abs(before)


def _clock(time: int) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%H:%M:%S UTC")
