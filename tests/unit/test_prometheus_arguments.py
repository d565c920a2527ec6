"""Whatever an experiment passes: a verdict, a number or one line; and what discovery shows."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaoslib.discovery.discover import discover_probes
from chaoslib.exceptions import ActivityFailed
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.observe import baseline
from chaosgpu.observe.verdict import Reading
from chaosgpu.probes import capture_baseline, metric_changed, metric_holds, metric_value, wait_for_metric
from chaosgpu.probes.chaosprometheus import metric_range

pytestmark = pytest.mark.toolkit

NOBODY = {"prometheus_base_url": "http://127.0.0.1:9", "prometheus_retries": 0}
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(
        ["", "5", "1e400", "nan", "inf", "-0", "5m", ">", "==", "fail", "pass", "ignore", "one", "all", "up"]
    )
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
RIGHT: dict[Callable[..., Any], dict[str, Any]] = {
    metric_value: {"query": "up"},
    metric_holds: {"query": "up", "op": ">", "value": 1},
    wait_for_metric: {"query": "up", "op": ">", "value": 1, "timeout": 0, "interval": 0.05},
    capture_baseline: {"name": "new", "query": "up"},
    metric_changed: {"baseline": "kept", "op": ">", "value": 1},
    metric_range: {"query": "up"},
}
NAMES = (
    "query",
    "op",
    "value",
    "percent",
    "reduce",
    "on_empty",
    "on_nan",
    "for_seconds",
    "max_sample_age",
    "min_series",
)
MORE_NAMES = (
    "on_warning",
    "settle_scrapes",
    "name",
    "baseline",
    "replace",
    "interval",
    "seconds",
    "step",
    "configuration",
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(RIGHT)), st.dictionaries(st.sampled_from(NAMES + MORE_NAMES), ODD, min_size=1, max_size=3))
def test_any_argument_is_one_line(probe: Callable[..., Any], odd: dict[str, Any]) -> None:
    baseline.keep("kept", baseline.Baseline("up", Reading(), 1.0))
    known = probe.__code__.co_varnames[: probe.__code__.co_argcount]
    arguments = {"configuration": NOBODY, **RIGHT[probe], **{k: v for k, v in odd.items() if k in known}}
    if not isinstance(arguments["configuration"], dict):
        arguments["configuration"] = None  # the toolkit passes a mapping or nothing
    with pytest.raises(ActivityFailed) as caught:
        probe(**arguments)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    assert len(text) < 500
    assert "Connection refused" in text or " is " in text or " are " in text or "exactly one of" in text


@pytest.mark.parametrize(
    ("probe", "wrong", "said"),
    [
        (metric_value, {"reduce": "all"}, "reduce is 'all': one, min, max, avg, sum, count or quantile Q is allowed"),
        (metric_value, {"on_empty": "pass"}, "on_empty is 'pass': fail or a number is allowed"),
        (metric_value, {"on_nan": math.nan}, "on_nan is nan: fail, ignore or a number is allowed"),
        (metric_holds, {"op": "=>"}, "op is '=>': one of >, >=, <, <=, ==, != is allowed"),
        (metric_holds, {"value": "many"}, "value is 'many': a number"),
        (metric_holds, {"value": True}, "value is True: a number"),
        (metric_holds, {"for_seconds": -1}, "for_seconds is -1"),
        (metric_holds, {"on_warning": "ignore"}, "on_warning is 'ignore': one of fail, log is allowed"),
        (metric_holds, {"query": ""}, "query is ''"),
        (metric_changed, {"percent": 5}, "give exactly one of value, percent (given: value and percent)"),
        (metric_changed, {"baseline": "nosuch"}, "capture_baseline has not kept it"),
        (metric_changed, {"baseline": "zero", "value": None, "percent": 5}, "the baseline zero is 0: compare by value"),
        (metric_range, {"step": 0}, "step is 0: a whole number from 2 to 300 is allowed"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(probe: Callable[..., Any], wrong: dict[str, Any], said: str) -> None:
    baseline.keep("kept", baseline.Baseline("up", Reading(), 1.0))
    baseline.keep("zero", baseline.Baseline("up", Reading(), 0.0))
    with pytest.raises(ActivityFailed) as caught:
        probe(**{"configuration": NOBODY, **RIGHT[probe], **wrong})
    assert said in str(caught.value)


def test_the_first_baseline_stands_and_nobody_is_asked_again() -> None:
    baseline.keep("first", baseline.Baseline("up", Reading(), 7.0))
    assert capture_baseline("first", "up", configuration=NOBODY) == 7
    with pytest.raises(ActivityFailed, match="another query or reduce"):
        capture_baseline("first", "down", configuration=NOBODY)
    with pytest.raises(ActivityFailed, match="another query or reduce"):
        capture_baseline("first", "up", reduce="max", configuration=NOBODY)
    with pytest.raises(ActivityFailed, match="Connection refused"):
        capture_baseline("first", "up", replace="true", configuration=NOBODY)


@pytest.mark.parametrize("module", ["chaosgpu.probes", "chaosgpu.probes.chaosprometheus"])
def test_discovery_knows_every_type(module: str) -> None:
    found = discover_probes(module)
    assert found
    for activity in found:
        assert activity["doc"]
        types = [argument["type"] for argument in activity["arguments"]] + [activity["return_type"]]
        assert "object" not in types, activity["name"]
    json.dumps(found)


def test_importing_the_probes_loads_no_client() -> None:
    code = "import sys, chaosgpu.probes; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not {"prometheus_api_client", "dateparser", "kubernetes", "numpy"} & set(done.stdout.split())
