"""Every kind of result of the HTTP API as one: series with labels and samples.

https://prometheus.io/docs/prometheus/latest/querying/api/#expression-query-result-formats
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chaosgpu.observe.errors import Unanswered

SHOWN_SERIES = 5
SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Series:
    """Labels, and samples as (Unix time in seconds, value); a value may be NaN or infinite."""

    labels: dict[str, str]
    samples: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        """How an error or a legend calls it: ``up{job="node"}``, cut to a line's length."""
        inner = ", ".join(f'{key}="{value}"' for key, value in sorted(self.labels.items()) if key != "__name__")
        text = self.labels.get("__name__", "") + (f"{{{inner}}}" if inner else "")
        text = "".join(character if character.isprintable() else "?" for character in text)
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def decode(result_type: Any, result: Any) -> tuple[Series, ...]:
    """The ``resultType`` and ``result`` of an answer as series. Servers differ in which type they give for what.

    :raises Unanswered: it is a text or native histograms, which no reduction makes a number of, or malformed.
    """
    try:
        if result_type == "string":
            raise Unanswered("the query gives a text, not numbers", transient=False)
        if result_type == "scalar":
            return (Series({}, (_sample(result),)),)
        if result_type not in ("vector", "matrix"):
            raise ValueError
        series = []
        for one in result:
            if "histogram" in one or "histograms" in one:
                raise Unanswered(
                    "the query gives native histograms: take numbers of them, by histogram_quantile or histogram_count",
                    transient=False,
                )
            labels = {str(key): str(value) for key, value in one["metric"].items()}
            samples = [one["value"]] if result_type == "vector" else one["values"]
            series.append(Series(labels, tuple(_sample(sample) for sample in samples)))
        return tuple(series)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Unanswered("the answer is not of Prometheus' HTTP API: its result is malformed", transient=True) from None


def _sample(pair: Any) -> tuple[float, float]:
    time, value = pair
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time):
        raise ValueError
    if not isinstance(value, str):
        raise ValueError
    return float(time), float(value)


def listed(lines: Iterable[str]) -> str:
    """A few of many, for a line of text."""
    every = list(lines)
    more = f" and {len(every) - SHOWN_SERIES} more" if len(every) > SHOWN_SERIES else ""
    return "; ".join(every[:SHOWN_SERIES]) + more
