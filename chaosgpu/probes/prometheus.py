"""Numbers and verdicts from Prometheus and from what speaks its HTTP API.

Where the server is, and how we may ask it, stands in the experiment's configuration and secrets: see
chaosgpu.observe.connection for the keys. A server that gives no answer is a failed activity; a system that is not as it
should be is ``false``, and the log says why.

VictoriaMetrics answers for the time 30 s ago unless it runs with ``-search.latencyOffset``, shows no NaN, and shows a
series for a while after its exporter is gone: ``max_sample_age`` and ``settle_scrapes`` see that.
"""

import logging
import time
from typing import Any

from chaoslib.types import Configuration, Secrets

from chaosgpu.changes.errors import BadArgument
from chaosgpu.faults import params
from chaosgpu.observe import baseline as baselines
from chaosgpu.observe.check import Trust, asked, check, measure, short
from chaosgpu.observe.errors import NoValue, Unanswered
from chaosgpu.observe.verdict import FAIL, IGNORE, OPERATORS, PASS, Condition, Reading, Verdict, changed, reducer

__all__ = ["capture_baseline", "metric_changed", "metric_holds", "metric_value", "wait_for_metric"]

logger = logging.getLogger("chaostoolkit")

_query = params.text(longest=65536, allowed="PromQL, up to 65536 characters,")
_name = params.text(longest=200, allowed="a name, up to 200 characters,")
_number = params.number(-1e300, 1e300)
DAY_SECONDS = 86400


def metric_value(
    query: str,
    reduce: str = "one",
    on_empty: str = "fail",
    on_nan: str = "fail",
    max_sample_age: float = None,
    min_series: int = 0,
    on_warning: str = "fail",
    settle_scrapes: int = 0,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> float:
    """The value of a PromQL query now, as a finite number, for a tolerance such as a range.

    :param query: PromQL.
    :param reduce: what to make of several samples: one (more than one is an error), min, max, avg, sum, count, or
        "quantile 0.9".
    :param on_empty: where there is no data: fail, or the number to return.
    :param on_nan: for a NaN sample: fail, ignore it, or the number to take for it.
    :param max_sample_age: in seconds: an error if a series that the query reads has no sample as young as that.
    :param min_series: an error if fewer series than this have data.
    :param on_warning: if the server warns, such as of a partial answer: fail, or log.
    :param settle_scrapes: first wait until each series that the query reads has got so many new samples.

    Fails, with one line, if the server gives no answer or there is no finite number in it.
    """
    with asked(configuration, secrets) as server:
        reading = _reading(reduce, on_empty, on_nan, min_series)
        return measure(server, _query("query", query), reading, _trust(max_sample_age, on_warning, settle_scrapes))


def metric_holds(
    query: str,
    op: str,
    value: float,
    reduce: str = "all",
    on_empty: str = "fail",
    on_nan: str = "fail",
    for_seconds: float = 0,
    max_sample_age: float = None,
    min_series: int = 0,
    on_warning: str = "fail",
    settle_scrapes: int = 0,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> bool:
    """Whether the samples of a PromQL query meet a comparison now, and have met it for a while.

    :param query: PromQL.
    :param op: >, >=, <, <=, == or !=.
    :param value: what to compare with.
    :param reduce: which samples must meet it: all, any, or what is made of them: one (more than one is false), min,
        max, avg, sum, count, or "quantile 0.9".
    :param on_empty: where there is no data: fail, pass, or the number to take. A comparison in the query that no series
        meets gives no data; with max_sample_age, pass means that and not a dead exporter.
    :param on_nan: for a NaN sample: fail, ignore it, or the number to take for it.
    :param for_seconds: it must have held so long until now, at every step of a range query (1 s, and longer steps from
        1 h on); where no data fails, a gap in a series fails too, unless reduce is count.
    :param max_sample_age: in seconds: false if a series that the query reads has no sample as young as that.
    :param min_series: false if fewer series than this have data.
    :param on_warning: if the server warns, such as of a partial answer: fail (false), or log.
    :param settle_scrapes: first wait until each series that the query reads has got so many new samples.

    Fails, with one line, if the server gives no answer.
    """
    with asked(configuration, secrets) as server:
        query = _query("query", query)
        condition = _condition(op, value, reduce, on_empty, on_nan, min_series)
        seconds = params.seconds(0, DAY_SECONDS)("for_seconds", for_seconds)
        trust = _trust(max_sample_age, on_warning, settle_scrapes)
        return _told("metric_holds", query, check(server, query, condition, seconds, trust))


def wait_for_metric(
    query: str,
    op: str,
    value: float,
    timeout: float = 60,
    interval: float = 1,
    reduce: str = "all",
    on_empty: str = "fail",
    on_nan: str = "fail",
    for_seconds: float = 0,
    max_sample_age: float = None,
    min_series: int = 0,
    on_warning: str = "fail",
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> bool:
    """Wait until the samples of a PromQL query meet a comparison. False if they do not in time.

    :param timeout: how long to ask, in seconds; an answer that is then under way is still waited for.
    :param interval: how long to wait between questions, in seconds.

    The other arguments are those of metric_holds. A server that is away for a moment is asked again; fails, with one
    line, if it gave no answer at the end.
    """
    begun = time.monotonic()
    with asked(configuration, secrets) as server:
        query = _query("query", query)
        condition = _condition(op, value, reduce, on_empty, on_nan, min_series)
        seconds = params.seconds(0, DAY_SECONDS)("for_seconds", for_seconds)
        trust = _trust(max_sample_age, on_warning, 0)
        limit = params.seconds(0, DAY_SECONDS)("timeout", timeout)
        pause = params.seconds(0.05, 3600)("interval", interval)
        while True:
            failure = None
            try:
                verdict = check(server, query, condition, seconds, trust)
            except Unanswered as error:
                if not error.transient:
                    raise
                failure = error
                logger.debug("%s", failure)
            waited = time.monotonic() - begun
            if failure is None and verdict.holds:
                logger.info("After %.1f s: %s (query: %s)", waited, verdict.reason, short(query))
                return True
            if waited >= limit:
                if failure is not None:
                    raise failure
                return _told(f"wait_for_metric, after {waited:.1f} s,", query, verdict)
            time.sleep(min(pause, limit - waited))


def capture_baseline(
    name: str,
    query: str,
    reduce: str = "one",
    on_empty: str = "fail",
    on_nan: str = "fail",
    max_sample_age: float = None,
    min_series: int = 0,
    on_warning: str = "fail",
    replace: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> float:
    """Measure a PromQL query and keep the number under a name, for metric_changed later in the same run. Returns it.

    :param name: under which it is kept. The first number stands: a later call asks nothing and returns it, so that this
        may be a probe of the steady-state hypothesis, which is evaluated again after the method.
    :param replace: measure again and keep that.

    The other arguments are those of metric_value. Fails, with one line, if the server gives no answer or there is no
    finite number in it.
    """
    with asked(configuration, secrets) as server:
        name = _name("name", name)
        query = _query("query", query)
        reading = _reading(reduce, on_empty, on_nan, min_series)
        trust = _trust(max_sample_age, on_warning, 0)
        anew = params.flag("replace", replace)
        standing = baselines.standing(name, query, reading)
        if standing is None or anew:
            standing = baselines.Baseline(query, reading, measure(server, query, reading, trust))
            baselines.keep(name, standing)
        return standing.value


def metric_changed(
    baseline: str,
    op: str,
    value: float = None,
    percent: float = None,
    max_sample_age: float = None,
    on_warning: str = "fail",
    settle_scrapes: int = 0,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> bool:
    """Whether a number has changed, since capture_baseline, as a comparison says.

    The change is the number now less the baseline: {"op": "<=", "percent": -50} is true when it has fallen by half or
    more, {"op": ">=", "value": 3} when it has risen by 3 or more. What is measured, and how, is what was captured.

    :param baseline: the name given to capture_baseline.
    :param op: >, >=, <, <=, == or !=.
    :param value: compare the difference with this; or
    :param percent: compare the difference in percent of the baseline's size with this.
    :param max_sample_age: in seconds: false if a series that the query reads has no sample as young as that.
    :param on_warning: if the server warns, such as of a partial answer: fail (false), or log.
    :param settle_scrapes: first wait until each series that the query reads has got so many new samples.

    False where there is no number now. Fails, with one line, if the server gives no answer, there is no such baseline,
    or percent of zero are asked for.
    """
    with asked(configuration, secrets) as server:
        kind, given = params.exactly_one({"value": value, "percent": percent})
        wanted = _number(kind, given)
        compare = OPERATORS[params.choice(*OPERATORS)("op", op)]
        trust = _trust(max_sample_age, on_warning, settle_scrapes)
        before = baselines.find(_name("baseline", baseline))
        if kind == "percent" and before.value == 0:
            raise BadArgument(f"percent is given, and the baseline {baseline} is 0: compare by value")
        try:
            now = measure(server, before.query, before.reading, trust)
        except NoValue as error:
            return _told("metric_changed", before.query, Verdict(False, str(error)))
        change = changed(before.value, now, kind == "percent")
        unit = " %" if kind == "percent" else ""
        holds = compare(change, wanted)
        compared = f"{change:+g}{unit}, which is {'' if holds else 'not '}{op} {wanted:g}{unit}"
        return _told("metric_changed", before.query, Verdict(holds, f"{before.value:g} became {now:g}: {compared}"))


def _told(what: str, query: str, verdict: Verdict) -> bool:
    if verdict.holds:
        logger.debug("%s is true: %s (query: %s)", what, verdict.reason, short(query))
    else:
        logger.warning("%s is false: %s (query: %s)", what, verdict.reason, short(query))
    return verdict.holds


def _reading(reduce: Any, on_empty: Any, on_nan: Any, min_series: Any, condition: bool = False) -> Reading:
    words = [FAIL, PASS] if condition else [FAIL]
    if not isinstance(reduce, str) or (reduce in ("all", "any") and not condition):
        raise BadArgument(f"reduce is {params.shown(reduce)}: one, min, max, avg, sum, count or quantile Q is allowed")
    reducer(reduce)
    return Reading(
        reduce,
        _word_or_number("on_empty", on_empty, words),
        _word_or_number("on_nan", on_nan, [FAIL, IGNORE]),
        params.integer(0, 10**9)("min_series", min_series),
    )


def _condition(op: Any, value: Any, reduce: Any, on_empty: Any, on_nan: Any, min_series: Any) -> Condition:
    reading = _reading(reduce, on_empty, on_nan, min_series, condition=True)
    return Condition(params.choice(*OPERATORS)("op", op), _number("value", value), reading)


def _trust(max_sample_age: Any, on_warning: Any, settle_scrapes: Any) -> Trust:
    return Trust(
        None if max_sample_age is None else params.seconds(0.1, DAY_SECONDS)("max_sample_age", max_sample_age),
        params.choice(FAIL, "log")("on_warning", on_warning) == FAIL,
        params.integer(0, 20)("settle_scrapes", settle_scrapes),
    )


def _word_or_number(name: str, value: Any, words: list[str]) -> Any:
    if isinstance(value, str) and value in words:
        return value
    try:
        return _number(name, value)
    except BadArgument:
        allowed = ", ".join(words)
        raise BadArgument(f"{name} is {params.shown(value)}: {allowed} or a number is allowed") from None
