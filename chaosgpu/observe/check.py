"""One question to a server, from asking to a number or a verdict."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaoslib.exceptions import ActivityFailed

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.observe.connection import read_connection
from chaosgpu.observe.errors import NoValue
from chaosgpu.observe.freshness import settle, stale
from chaosgpu.observe.series import listed
from chaosgpu.observe.verdict import Condition, Reading, Verdict, judge, judge_window, number

if TYPE_CHECKING:
    from chaosgpu.observe.client import Answer, Prometheus

logger = logging.getLogger("chaostoolkit")

MOST_STEPS = 3600  # of a range query; Prometheus allows 11,000 per series
SHOWN_QUERY_CHARACTERS = 200


@contextmanager
def asked(configuration: Any, secrets: Any) -> "Iterator[Prometheus]":
    """The server that an experiment names, while it is asked. Expected errors leave as the toolkit's, in one line."""
    # Not above: importing the probes must not load an HTTP client.
    from chaosgpu.observe.client import Prometheus

    try:
        with Prometheus(read_connection(configuration, secrets)) as server:
            yield server
    except ChaosgpuError as error:
        raise ActivityFailed(str(error)) from None


@dataclass(frozen=True)
class Trust:
    """What must be true of an answer before its numbers count.

    :param max_sample_age: in seconds, by the server's clock; None: as old as the server shows them.
    :param fail_on_warning: whether an answer with warnings, such as one without a store's series, counts.
    :param settle_scrapes: how many new samples each series must get before the question is asked.
    """

    max_sample_age: float | None = None
    fail_on_warning: bool = True
    settle_scrapes: int = 0

    def refusal(self, server: "Prometheus", query: str) -> str | None:
        """Why the query must not be believed now, after settling."""
        unsettled = settle(server, query, self.settle_scrapes)
        if unsettled is None and self.max_sample_age is not None:
            return stale(server, query, self.max_sample_age)
        return unsettled

    def warned(self, answer: "Answer") -> str | None:
        """The answer's warnings where they matter; where they do not, they are logged."""
        if not answer.warnings:
            return None
        told = f"the server warns, so that series may be missing: {listed(answer.warnings)}"
        if self.fail_on_warning:
            return told
        logger.warning("%s", told)
        return None


def measure(server: "Prometheus", query: str, reading: Reading, trust: Trust) -> float:
    """The number that the query gives now.

    :raises NoValue: there is none, or it must not be believed.
    :raises Unanswered: the server gave no answer.
    """
    refused = trust.refusal(server, query)
    if refused is None:
        answer = server.query(query)
        refused = trust.warned(answer)
        if refused is None:
            try:
                return number(answer.series, reading)
            except NoValue as error:
                refused = str(error)
    raise NoValue(f"{refused} (query: {short(query)})")


def check(server: "Prometheus", query: str, condition: Condition, for_seconds: float, trust: Trust) -> Verdict:
    """Whether the condition holds now, and has held for so long.

    :raises Unanswered: the server gave no answer.
    """
    refused = trust.refusal(server, query)
    if refused is not None:
        return Verdict(False, refused)
    if not for_seconds:
        answer = server.query(query)
        refused = trust.warned(answer)
        return judge(answer.series, condition) if refused is None else Verdict(False, refused)
    step = max(1, math.ceil(for_seconds / MOST_STEPS))
    end = int(server.now())
    start = end - math.ceil(for_seconds / step) * step
    answer = server.query_range(query, start, end, step)
    refused = trust.warned(answer)
    return judge_window(answer.series, condition, start, end, step) if refused is None else Verdict(False, refused)


def short(query: str) -> str:
    """A query as a line of a log shows it."""
    text = " ".join(query.split())
    return text if len(text) <= SHOWN_QUERY_CHARACTERS else text[: SHOWN_QUERY_CHARACTERS - 3] + "..."
