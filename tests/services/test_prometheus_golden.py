"""What Prometheus 2.42 and VictoriaMetrics 1.79.5 answer to the same question, and what the probes make of it."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from chaoslib.exceptions import ActivityFailed

from chaosgpu.observe.client import Prometheus
from chaosgpu.observe.connection import read_connection
from chaosgpu.probes import capture_baseline, metric_changed, metric_holds, metric_value, wait_for_metric
from chaosgpu.probes.chaosprometheus import metric_range

pytestmark = [pytest.mark.services, pytest.mark.toolkit]

NO_DATA = "no data"
QUANTILE = "histogram_quantile(0.9, sum by (le) (rate(idle_bucket[5s])))"


@pytest.fixture(scope="module", params=["prometheus", "victoria"])
def server(request: pytest.FixtureRequest, monitoring: Any) -> dict[str, Any]:
    """The configuration for one of the two servers, which has scraped for five seconds and more."""
    configuration = at(getattr(monitoring, request.param), name=request.param)
    assert wait_for_metric("count_over_time(g[20s])", ">=", 6, timeout=40, min_series=2, configuration=configuration)
    return configuration


def at(base_url: str, **more: Any) -> dict[str, Any]:
    return {"prometheus_base_url": base_url, **more}


def outcome(probe: Callable[..., Any], arguments: dict[str, Any], configuration: dict[str, Any]) -> Any:
    """What the probe returns, or its error's text."""
    try:
        return probe(**arguments, configuration=configuration)
    except ActivityFailed as error:
        return str(error)


# What is asked; what Prometheus makes of it; what VictoriaMetrics does. A text is a part of the error's.
VALUES: list[tuple[dict[str, Any], float | str, float | str]] = [
    ({"query": "nosuch"}, NO_DATA, NO_DATA),
    ({"query": "nosuch", "on_empty": "0"}, 0.0, 0.0),
    ({"query": "nosuch", "on_empty": -1.5}, -1.5, -1.5),
    ({"query": "g > 70"}, NO_DATA, NO_DATA),
    ({"query": 'g{rank="0"}'}, 50.0, 50.0),
    ({"query": "g"}, "2 samples, and one is wanted", "2 samples, and one is wanted"),
    ({"query": "g", "reduce": "max"}, 60.0, 60.0),
    ({"query": "g", "reduce": "min"}, 50.0, 50.0),
    ({"query": "g", "reduce": "avg"}, 55.0, 55.0),
    ({"query": "g", "reduce": "sum"}, 110.0, 110.0),
    ({"query": "g", "reduce": "count"}, 2.0, 2.0),
    ({"query": "g", "reduce": "quantile 0.25"}, 52.5, 52.5),
    ({"query": "g", "reduce": "max", "min_series": 3}, "2 series have data", "2 series have data"),
    ({"query": "not_a_number"}, "is NaN", NO_DATA),
    ({"query": "not_a_number", "on_nan": "ignore"}, NO_DATA, NO_DATA),
    ({"query": "not_a_number", "on_nan": "7", "on_empty": "8"}, 7.0, 8.0),
    ({"query": "avg(not_a_number)"}, "is NaN", NO_DATA),
    ({"query": 'max(g or label_replace(not_a_number, "rank", "2", "", ""))'}, 60.0, 60.0),
    ({"query": "not_a_number > 1"}, NO_DATA, NO_DATA),
    ({"query": "0/0"}, "is NaN", NO_DATA),
    ({"query": "scalar(nosuch)"}, "is NaN", NO_DATA),
    ({"query": "1+1"}, 2.0, 2.0),
    ({"query": 'g{rank="0"}[5s]'}, "samples, and one is wanted", "samples, and one is wanted"),
    ({"query": "g[5s]", "reduce": "max"}, 60.0, 60.0),
    ({"query": QUANTILE}, "is NaN", NO_DATA),
    ({"query": QUANTILE, "on_nan": "0", "on_empty": "0"}, 0.0, 0.0),
    ({"query": "rate(steps_total[1ms]) > bool 5"}, NO_DATA, 1.0),  # VictoriaMetrics takes the sample before the window
    ({"query": "no_end"}, "the value is inf, and not a finite number", "the value is inf, and not a finite number"),
    ({"query": "sum("}, "HTTP 400 (bad_data: ", "HTTP 422 (422: "),
    ({"query": "pushed"}, 5.0, 5.0),
    ({"query": "pushed", "max_sample_age": 30}, "s old, and 30 s are allowed", "s old, and 30 s are allowed"),
    ({"query": "sum(pushed) * 2", "max_sample_age": 30}, "s old, and 30 s", "s old, and 30 s"),
    ({"query": "pushed", "max_sample_age": "1h"}, 5.0, 5.0),
    ({"query": 'g{rank="1"}', "max_sample_age": 10}, 60.0, 60.0),
    ({"query": "nosuch", "max_sample_age": 10, "on_empty": "0"}, "nosuch has no samples", "nosuch has no samples"),
]

CONDITIONS: list[tuple[dict[str, Any], bool | str, bool | str]] = [
    ({"query": "g", "op": ">", "value": 49}, True, True),
    ({"query": "g", "op": ">", "value": "55"}, False, False),
    ({"query": "g", "op": ">", "value": 55, "reduce": "any"}, True, True),
    ({"query": "g", "op": "==", "value": 110, "reduce": "sum"}, True, True),
    ({"query": "g", "op": ">", "value": 0, "min_series": 2}, True, True),
    ({"query": "g", "op": ">", "value": 0, "min_series": 3}, False, False),
    ({"query": "nosuch", "op": ">", "value": 0}, False, False),
    ({"query": "nosuch", "op": ">", "value": 0, "on_empty": "pass"}, True, True),
    ({"query": "nosuch", "op": ">", "value": 0, "on_empty": "pass", "min_series": 1}, False, False),
    ({"query": "nosuch", "op": "==", "value": 3, "on_empty": 3}, True, True),
    ({"query": "g > 70", "op": ">", "value": 70, "on_empty": "pass", "max_sample_age": 10}, True, True),
    ({"query": "nosuch > 70", "op": ">", "value": 70, "on_empty": "pass", "max_sample_age": 10}, False, False),
    ({"query": "not_a_number", "op": "<", "value": 1}, False, False),
    ({"query": "not_a_number", "op": "!=", "value": 1}, False, False),
    ({"query": "0/0", "op": "<", "value": 1}, False, False),
    ({"query": "1+1", "op": "==", "value": 2}, True, True),
    ({"query": "1+1", "op": "==", "value": 2, "for_seconds": 3}, True, True),
    ({"query": "g[5s]", "op": ">=", "value": 50}, True, True),
    ({"query": "g[5s]", "op": ">", "value": 50}, False, False),
    ({"query": "no_end", "op": ">", "value": 5}, True, True),
    ({"query": "no_end - no_end", "op": "<", "value": 5}, False, False),
    ({"query": QUANTILE, "op": "<", "value": 1}, False, False),
    ({"query": QUANTILE, "op": "<", "value": 1, "on_nan": "ignore", "on_empty": "pass"}, True, True),
    ({"query": "g", "op": ">=", "value": 50, "for_seconds": "3s"}, True, True),
    ({"query": "g", "op": "<", "value": 60, "for_seconds": 3}, False, False),
    ({"query": "g", "op": ">=", "value": 50, "for_seconds": 3600}, False, False),  # it has not been seen so long
    ({"query": "g", "op": "==", "value": 2, "reduce": "count", "for_seconds": 3}, True, True),
    ({"query": "rate(steps_total[4s])", "op": ">", "value": 5}, True, True),
    ({"query": "sum(", "op": ">", "value": 5}, "check the query", "check the query"),
]


def expected(server: dict[str, Any], prometheus: Any, victoria: Any) -> Any:
    return prometheus if server["name"] == "prometheus" else victoria


@pytest.mark.parametrize(("arguments", "prometheus", "victoria"), VALUES, ids=lambda case: json.dumps(case))
def test_value(server: dict[str, Any], arguments: dict[str, Any], prometheus: Any, victoria: Any) -> None:
    wanted = expected(server, prometheus, victoria)
    got = outcome(metric_value, arguments, server)
    if isinstance(wanted, str):
        assert isinstance(got, str)
        assert wanted in got
        assert "\n" not in got
    else:
        assert got == wanted
        assert type(got) is float


@pytest.mark.parametrize(("arguments", "prometheus", "victoria"), CONDITIONS, ids=lambda case: json.dumps(case))
def test_condition(
    server: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    prometheus: Any,
    victoria: Any,
) -> None:
    wanted = expected(server, prometheus, victoria)
    with caplog.at_level(logging.WARNING, logger="chaostoolkit"):
        got = outcome(metric_holds, arguments, server)
    if isinstance(wanted, str):
        assert wanted in got
    else:
        assert got is wanted
        explained = [record for record in caplog.records if record.getMessage().startswith("metric_holds is false: ")]
        assert len(explained) == (not wanted)


def test_reason_names_the_series(server: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert not metric_holds("g", ">", 55, configuration=server)
    assert 'rank="0"} 50 (query: g)' in caplog.text
    assert "1 of 2 samples are > 55" in caplog.text


def test_waiting_ends_when_it_is_true_and_when_time_is_over(server: dict[str, Any]) -> None:
    further = metric_value("steps_total", configuration=server) + 15
    assert wait_for_metric("steps_total", ">", further, timeout=20, interval=0.2, configuration=server)
    assert not wait_for_metric("steps_total", "<", 0, timeout=0.5, interval=0.2, configuration=server)


def test_a_range_is_plain_json_in_whole_numbers_for_the_report(server: dict[str, Any]) -> None:
    found = metric_range('g{rank="0"} / 100 or no_end or not_a_number', seconds=4, configuration=server)
    json.dumps(found, allow_nan=False)
    drawn = found["data"]
    assert (drawn["resultType"], drawn["scale"]) == ("matrix", 1000)
    (half,) = (index for index, one in enumerate(found["series"]) if "rank" in one["labels"])
    assert [value for _, value in found["series"][half]["values"]] == [0.5] * 5
    assert [value for _, value in drawn["result"][half]["values"]] == [500] * 5
    assert "(times 1000)" in drawn["result"][half]["metric"]["series"]
    assert sum(len(one["values"]) for one in found["series"]) == 5


def test_a_range_has_the_steps_that_were_asked_for(server: dict[str, Any]) -> None:
    """VictoriaMetrics by itself moves them to multiples of the step, which a window would take for gaps."""
    with Prometheus(read_connection(server, {})) as asked:
        end = int(asked.now()) - 1
        end -= (end - 1) % 3
        (series,) = asked.query_range('g{rank="0"}', end - 300, end, 3).series
    assert {time % 3 for time, _ in series.samples} == {1}


def test_a_query_longer_than_a_url_may_be(monitoring: Any) -> None:
    query = f'max(g{{rank=~"{"|".join(["1"] * 30_000)}"}})'
    assert metric_value(query, configuration=at(monitoring.prometheus)) == 60


def test_the_path_prefix_is_needed(monitoring: Any) -> None:
    bare = monitoring.prometheus.removesuffix("/monitoring")
    with pytest.raises(ActivityFailed, match=r"check prometheus_base_url|check the path in prometheus_base_url"):
        metric_value("1", configuration=at(bare))


def test_settling_leaves_behind_what_was_before(server: dict[str, Any], monitoring: Any) -> None:
    assert (
        capture_baseline(f"knob on {server['name']}", "knob", configuration=server) == monitoring.exporter.lines["knob"]
    )
    monitoring.exporter.lines["knob"] *= 4
    assert metric_changed(f"knob on {server['name']}", "==", percent=300, settle_scrapes=1, configuration=server)
    assert not metric_holds("knob", "==", monitoring.exporter.lines["knob"], for_seconds=5, configuration=server)


def test_what_goes_away_and_what_victoria_metrics_still_shows(monitoring: Any) -> None:
    """The last one: it takes targets away, and waits out the time that VictoriaMetrics is behind."""
    prometheus, victoria = at(monitoring.prometheus), at(monitoring.victoria_late)
    assert not metric_holds("vanishing", "==", 7, max_sample_age=5, configuration=victoria)
    assert wait_for_metric("count(vanishing or alive)", "==", 2, timeout=60, configuration=victoria)
    del monitoring.exporter.lines["vanishing"]
    monitoring.exporter.lines["knob"] = 1000
    monitoring.mortal.kill()

    assert wait_for_metric('up{job="mortal"}', "==", 0, timeout=20, configuration=prometheus)
    assert metric_holds("vanishing or alive", "==", 0, on_empty="pass", min_series=0, configuration=prometheus)
    assert metric_value("knob", settle_scrapes=1, configuration=prometheus) == 1000

    assert metric_holds('up{job="mortal"}', "==", 1, configuration=victoria)
    assert metric_holds("vanishing", "==", 7, configuration=victoria)
    assert metric_value("alive", configuration=victoria) == 1
    assert metric_value("knob", configuration=victoria) < 1000
    assert not metric_holds("vanishing", "==", 7, max_sample_age=5, configuration=victoria)
    assert metric_holds("knob", "==", 1000, settle_scrapes=1, configuration=victoria)
