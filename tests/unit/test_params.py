"""Values as they come from JSON, the environment and people, with their units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosgpu.changes.errors import BadArgument
from chaosgpu.faults import params
from chaosgpu.faults.base import duration_seconds


@pytest.mark.parametrize(
    ("parse", "value", "parsed"),
    [
        (params.seconds(1, 3600), "90s", 90),
        (params.seconds(1, 3600), "5m", 300),
        (params.seconds(1, 3600), "1h", 3600),
        (params.seconds(1, 3600), 90, 90),
        (params.seconds(1, 3600), "90", 90),
        (params.seconds(0, 3600), "250ms", 0.25),
        (params.milliseconds(0, 1e6), 50, 50),
        (params.milliseconds(0, 1e6), "50ms", 50),
        (params.milliseconds(0, 1e6), "0.1s", 100),
        (params.size_bytes(0), "10GiB", 10 * 2**30),
        (params.size_bytes(0), "10GB", 10**10),
        (params.size_bytes(0), "4096", 4096),
        (params.bits_per_second(0), "100mbit", 10**8),
        (params.percent(), "20%", 20),
        (params.percent(), 20.5, 20.5),
        (params.integer(0, 10), "7", 7),
        (params.integer(0, 10), 7.0, 7),
        (params.number_list(10), "0-3,8", [0, 1, 2, 3, 8]),
        (params.number_list(10), 5, [5]),
        (params.number_list(10), [3, 1, 3], [1, 3]),
        (params.flag, "True", True),
        (params.choice("a", "b"), "b", "b"),
    ],
)
def test_units(parse, value, parsed):
    assert parse("argument", value) == parsed


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (params.seconds(1, 3600), "90 parsecs"),
        (params.seconds(1, 3600), "-5s"),
        (params.seconds(1, 3600), math.nan),
        (params.seconds(1, 3600), math.inf),
        (params.seconds(1, 3600), 10**400),
        (params.seconds(1, 3600), True),
        (params.seconds(1, 3600), None),
        (params.seconds(1, 3600), "nan"),
        (params.seconds(1, 3600), "٣"),
        (params.percent(), "101%"),
        (params.integer(0, 10), 1.5),
        (params.number_list(10), "3-1"),
        (params.number_list(10), "0-99999999999"),
        (params.number_list(10), []),
        (params.number_list(10), [True]),
        (params.path(), "relative"),
        (params.path(), "/nul\0"),
        (params.path(), "/lone\ud800"),
        (params.flag, 1),
        (params.choice("a"), []),
    ],
)
def test_what_is_refused_in_one_line(parse, value):
    with pytest.raises(BadArgument) as refusal:
        parse("argument", value)
    assert str(refusal.value).startswith("argument is ")
    assert len(str(refusal.value)) < 300
    assert "\n" not in str(refusal.value)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_survive_a_round_trip(cpus):
    from chaosgpu.changes.affinity import cpu_list

    assert params.parse_cpu_list(cpu_list(sorted(cpus))) == sorted(cpus)


def test_the_cap_is_raised_only_by_its_word():
    assert duration_seconds("1h", []) == 3600
    with pytest.raises(BadArgument, match="long_duration"):
        duration_seconds("2h", [])
    assert duration_seconds("2h", ["long_duration"]) == 7200
    with pytest.raises(BadArgument):
        duration_seconds("8000h", ["long_duration"])
