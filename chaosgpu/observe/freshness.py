"""How old the samples are that a query reads. Prometheus shows a sample for up to 5 minutes after the last one came."""

import time
from typing import TYPE_CHECKING

from chaosgpu.observe.promql import selectors

if TYPE_CHECKING:
    from chaosgpu.observe.client import Answer, Prometheus

SETTLE_LIMIT_SECONDS = 300  # Prometheus' look-back: after it, a series that gets no samples is gone
POLL_SECONDS = 0.5


def stale(server: "Prometheus", query: str, max_age_seconds: float) -> str | None:
    """Why the query must not be believed: a series it reads got no sample for so long. None where all are fresh.

    Age is by the server's clock. What a query reads is what its selectors match, so a comparison that no series meets
    is told apart from an exporter that is gone.
    """
    for selector in selectors(query):
        answer, oldest = _oldest(server, selector)
        if oldest is None:
            return f"{selector} has no samples"
        age = answer.server_time - oldest
        if age > max_age_seconds:
            who = next(iter(answer.series)).name
            return f"the newest sample of {selector} {who} is {age:.1f} s old, and {max_age_seconds:g} s are allowed"
    return None


def settle(server: "Prometheus", query: str, scrapes: int) -> str | None:
    """Wait until each series that the query reads has got so many new samples. Returns why it did not, or None.

    What was measured before the call, or is still on its way, is thereby behind us: scrape interval, remote write and
    VictoriaMetrics' latency offset need not be known.
    """
    limit = time.monotonic() + SETTLE_LIMIT_SECONDS
    for selector in selectors(query):
        for _ in range(scrapes):
            answer, oldest = _oldest(server, selector)
            since = answer.server_time + 1  # its clock was cut to whole seconds
            while oldest is not None and oldest <= since:
                if time.monotonic() > limit:
                    return f"{selector} got no new sample within {SETTLE_LIMIT_SECONDS} s"
                time.sleep(POLL_SECONDS)
                _, oldest = _oldest(server, selector)
    return None


def _oldest(server: "Prometheus", selector: str) -> "tuple[Answer, float | None]":
    """The newest sample's time of the series that is furthest behind."""
    answer = server.query(f"bottomk(1, timestamp({selector}))")
    return answer, answer.series[0].samples[0][1] if answer.series else None
