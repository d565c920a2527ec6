"""Answers of every type, and of none, become series or one error."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.observe.errors import Unanswered
from chaosgpu.observe.series import SHOWN_CHARACTERS, Series, decode, listed

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
NUMBERS = st.floats()
TIMES = st.floats(0, 4e9)
LABELS = st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=20), max_size=4)


def written(value: float) -> str:
    """As Prometheus writes a sample."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@settings(deadline=None)
@given(st.lists(st.tuples(LABELS, st.lists(st.tuples(TIMES, NUMBERS), min_size=1, max_size=4)), max_size=4))
def test_what_is_written_is_read(kept: list[tuple[dict[str, str], list[tuple[float, float]]]]) -> None:
    matrix = [{"metric": labels, "values": [[t, written(v)] for t, v in samples]} for labels, samples in kept]
    vector = [{"metric": labels, "value": [samples[0][0], written(samples[0][1])]} for labels, samples in kept]
    series = decode("matrix", json.loads(json.dumps(matrix)))
    assert [one.labels for one in series] == [labels for labels, _ in kept]
    assert repr([one.samples for one in series]) == repr([tuple(samples) for _, samples in kept])  # NaN is like NaN
    assert repr(decode("vector", vector)) == repr(tuple(Series(labels, (samples[0],)) for labels, samples in kept))


@settings(deadline=None)
@given(TIMES, NUMBERS)
def test_a_scalar_is_a_series_without_labels(time: float, value: float) -> None:
    (series,) = decode("scalar", [time, written(value)])
    assert series.labels == {}
    assert repr(series.samples) == repr(((time, value),))


@settings(deadline=None)
@given(st.sampled_from(["vector", "matrix", "scalar", "string", "", None, 3]) | ANYTHING, ANYTHING)
def test_anything_else_is_refused_in_one_line(result_type: object, result: object) -> None:
    try:
        decode(result_type, result)
    except Unanswered as error:
        told = str(error)
    else:
        told = "fine"
    assert "\n" not in told
    assert told != "fine" or result in ([], {}, "") or result_type == "scalar"


@pytest.mark.parametrize(
    "pair", [[1], [1, 2], ["1", "2"], [True, "1"], [math.nan, "1"], [1, "one"], [1, None], None, "12"]
)
def test_a_sample_is_a_time_and_a_number_as_text(pair: object) -> None:
    with pytest.raises(Unanswered, match="malformed"):
        decode("vector", [{"metric": {}, "value": pair}])


def test_native_histograms_and_texts_can_never_be_judged() -> None:
    for result_type, result in (
        ("vector", [{"metric": {}, "histogram": [1, {}]}]),
        ("matrix", [{"metric": {}, "histograms": [[1, {}]]}]),
        ("string", [1, "text"]),
    ):
        with pytest.raises(Unanswered) as caught:
            decode(result_type, result)
        assert not caught.value.transient


@settings(deadline=None)
@given(LABELS)
def test_a_name_is_a_printable_line(labels: dict[str, str]) -> None:
    name = Series(labels, ()).name
    assert len(name) <= SHOWN_CHARACTERS
    assert name.isprintable()


def test_names_are_as_prometheus_writes_them_and_many_are_few() -> None:
    assert Series({"__name__": "up", "job": "node", "instance": "a:1"}, ()).name == 'up{instance="a:1", job="node"}'
    assert listed("abcdefg") == "a; b; c; d; e and 2 more"
    assert listed("ab") == "a; b"
