"""The selectors of a query: what it reads, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.observe.promql import selectors


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("up", ["up"]),
        ("1 + 1.5e-3 - 0x1F + Inf + NaN", []),
        ('"text" ', []),
        ('up{job="a,b}", x=~"[0-9]{2}"} > 3', ['up{job="a,b}",x=~"[0-9]{2}"}']),
        ("{__name__=~'node_.*'}", ["{__name__=~'node_.*'}"]),
        ("rate(http_requests_total[5m])", ["http_requests_total"]),
        ("rate(vllm:tokens_total{model='x'}[1m:5s] offset 1h)", ["vllm:tokens_total{model='x'}"]),
        ("x offset -5m @ 1609746000.5 + y @ end()", ["x", "y"]),
        ("sum by (le, job) (rate(b_bucket[1m])) / sum(rate(b_count[1m])) by (job)", ["b_bucket", "b_count"]),
        ("a * on (x, y) group_left (z) b and ignoring(q) c unless d or e", ["a", "b", "c", "d", "e"]),
        ("a / on(x) group_right b", ["a", "b"]),
        ("histogram_quantile(0.99, sum by (le) (rate(t_bucket[2m]))) < bool 0.5", ["t_bucket"]),
        ('count_values without (x) ("v", build_info)', ["build_info"]),
        ("quantile_over_time(0.5, x[1h])", ["x"]),
        ("up # == down\n + up", ["up"]),
        ("time() - timestamp(g) + scalar(h) + vector(1)", ["g", "h"]),
        ("max_over_time((rate(a[1m]) > 5)[10m:30s])", ["a"]),
        ("sum(a) BY (b) OR Bool_metric", ["a", "Bool_metric"]),
        ("a default 0 ifnot b keep_metric_names", ["a", "b"]),
        ('x{a="\\"", b=`}`}', ['x{a="\\"",b=`}`}']),
        ("", []),
    ],
    ids=str,
)
def test_selectors(query: str, found: list[str]) -> None:
    assert selectors(query) == found


@settings(deadline=None)
@given(st.text(alphabet="ab({[]})\"'`#,\n =~5m.by on") | st.text())
def test_any_text_ends_in_parts_of_itself(query: str) -> None:
    packed = "".join(query.split())
    for selector in selectors(query):
        assert "".join(selector.split()) in packed or "#" in query
