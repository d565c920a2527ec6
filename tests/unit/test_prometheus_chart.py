"""What a range becomes: plain JSON, and whole numbers that chaostoolkit-reporting can draw."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.observe.chart import DRAWN_SERIES, LEAST_STEPS, charted
from chaosgpu.observe.series import Series

SAMPLES = st.lists(st.tuples(st.integers(0, 4 * 10**9).map(float), st.floats()), max_size=6).map(tuple)
SERIES = st.builds(Series, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), SAMPLES)


@settings(deadline=None)
@given(st.lists(SERIES, max_size=DRAWN_SERIES + 3))
def test_any_range_is_json_and_drawn_as_the_report_draws(series: list[Series]) -> None:
    found = json.loads(json.dumps(charted("up", series), allow_nan=False))
    assert found["data"]["resultType"] == "matrix"
    assert len(found["series"]) + found["series_left_out"] == len(series)
    scale = found["data"]["scale"]
    for kept, drawn in zip(found["series"], found["data"]["result"], strict=True):
        # the report: int(value[1]), and "_".join of all labels but __name__, unless there is one called method or pod
        assert list(drawn["metric"]) == ["series"]
        assert drawn["metric"]["series"].strip()
        assert [time for time, _ in drawn["values"]] == [time for time, _ in kept["values"]]
        for (_, value), (_, whole) in zip(kept["values"], drawn["values"], strict=True):
            assert isinstance(whole, int)
            assert math.isclose(whole, value * scale, abs_tol=0.5, rel_tol=1e-9)


def test_small_numbers_are_not_cut_to_nothing() -> None:
    def drawn(*values: float) -> tuple[int, list[int], str]:
        samples = tuple((float(time), value) for time, value in enumerate(values))
        data = charted("x", [Series({"__name__": "x"}, samples)])["data"]
        return data["scale"], [value for _, value in data["result"][0]["values"]], data["result"][0]["metric"]["series"]

    assert drawn(0.25, 0.5) == (1000, [250, 500], "x (times 1000)")
    assert drawn(3, 50) == (1, [3, 50], "x")
    assert drawn(1234.6, 5) == (1, [1235, 5], "x")
    assert drawn(0, 0) == (1, [0, 0], "x")
    assert max(drawn(5e-324, 0)[1]) == 0
    assert max(drawn(2e-9)[1]) >= LEAST_STEPS


def test_legends_say_what_differs() -> None:
    common = {"__name__": "up", "job": "node"}
    two = [Series({**common, "rank": rank}, ()) for rank in "01"]
    assert [one["metric"]["series"] for one in charted("up", two)["data"]["result"]] == ['{rank="0"}', '{rank="1"}']
    assert charted("up", two[:1])["data"]["result"][0]["metric"]["series"] == 'up{job="node", rank="0"}'
    assert charted("1", [Series({}, ())])["data"]["result"][0]["metric"]["series"] == "value"
