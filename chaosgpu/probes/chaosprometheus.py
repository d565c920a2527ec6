"""The probe that ``chaos report`` draws.

chaostoolkit-reporting 0.18 makes charts of a probe only if its module's name has "chaosprometheus" in it, its output is
Prometheus' range answer, and it has an argument called query. So this module has that name, and experiments name it:
``"module": "chaosgpu.probes.chaosprometheus", "func": "metric_range"``. No control, plugin or patch is needed then.
"""

import math
from typing import Any, Dict

from chaoslib.types import Configuration, Secrets

from chaosgpu.faults import params
from chaosgpu.observe.chart import charted
from chaosgpu.observe.check import asked

__all__ = ["metric_range"]

MOST_POINTS = 240  # on a chart some 800 pixels wide, of which the report's time grows with the square


def metric_range(
    query: str,
    seconds: float = 300,
    step: float = None,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """The values of a PromQL query over the last while, which chaos report draws as a chart.

    Put it at the end of the method, with so many seconds as the method took.

    :param query: PromQL. Up to 20 series are kept.
    :param seconds: how far back, by the server's clock.
    :param step: whole seconds between the values; if not given, so many that there are 240 at most. Not fewer.

    Returns ``{"query", "series": [{"labels", "values": [[time, value], ...]}], "series_left_out", "data"}``, with times
    in Unix time, and with what the report draws in ``data``. NaN and infinite values are left out. Fails, with one
    line, if the server gives no answer.
    """
    with asked(configuration, secrets) as server:
        query = params.text(longest=65536, allowed="PromQL, up to 65536 characters,")("query", query)
        window = math.ceil(params.seconds(1, 30 * 86400)("seconds", seconds))
        fitting = math.ceil(window / MOST_POINTS)
        spacing = fitting if step is None else params.integer(fitting, window)("step", step)
        end = int(server.now())
        return charted(query, server.query_range(query, end - window, end, spacing).series)
