"""A range query's result as a journal keeps it and as ``chaos report`` draws it."""

import math
from collections.abc import Sequence
from typing import Any

from chaosgpu.observe.series import Series

DRAWN_SERIES = 20
LEAST_STEPS = 100  # that a curve is high, in the whole numbers to which chaostoolkit-reporting cuts it


def charted(query: str, series: Sequence[Series]) -> dict[str, Any]:
    """Plain JSON: ``series`` with labels and (time, value), and ``data``, which chaostoolkit-reporting 0.18 draws.

    That takes ``data`` for Prometheus' own answer, but cuts each value to a whole number, ends in an error on text such
    as ``"0.5"`` or ``"NaN"`` and on a label called ``method``, and names a curve by its labels' values joined. So
    ``data`` has whole numbers, multiplied by the power of ten in ``data.scale`` where they would be small, and one
    label with a legend that says both. NaN and infinite samples are gaps.
    """
    kept = [
        (one, [[time, value] for time, value in one.samples if math.isfinite(value)]) for one in series[:DRAWN_SERIES]
    ]
    scale = _scale([value for _, samples in kept for _, value in samples])
    legends = _legends([one for one, _ in kept])
    return {
        "query": query,
        "series": [{"labels": one.labels, "values": samples} for one, samples in kept],
        "series_left_out": len(series) - len(kept),
        "data": {
            "resultType": "matrix",
            "scale": scale,
            "result": [
                {
                    "metric": {"series": legend if scale == 1 else f"{legend} (times {scale})"},
                    "values": [[time, round(value * scale)] for time, value in samples],
                }
                for legend, (_, samples) in zip(legends, kept, strict=True)
            ],
        },
    }


def _scale(values: list[float]) -> int:
    highest = max(map(abs, values), default=0)
    if highest == 0 or all(value == int(value) for value in values):
        return 1
    return int(10 ** min(12, max(0, math.ceil(math.log10(LEAST_STEPS) - math.log10(highest)))))


def _legends(series: Sequence[Series]) -> list[str]:
    """Names of the series without the labels that all of them share, unless nothing else is left."""
    shared = set.intersection(*(set(one.labels.items()) for one in series)) if len(series) > 1 else set()
    short = [Series(dict(set(one.labels.items()) - shared), ()).name for one in series]
    return [name or one.name or "value" for name, one in zip(short, series, strict=True)]
