"""A stop-and-go cycle: processes run for a share of each period and stand still for the rest, held by ptrace.

When this helper dies, whatever killed it, the kernel lets them run (chaosgpu.helpers.tracer).
"""

import time
from typing import Any, Callable, Dict

from chaosgpu.helpers.tracer import CannotTrace, Tracer, threads

PERIOD_SECONDS = 0.1


def run(arguments: Dict[str, Any], ready: Callable[[], Any]) -> None:
    """Slow ``arguments["pids"]`` to ``arguments["percent"]`` of the time, until killed or all of them have ended.

    The first stop of each process comes before ``ready``: one that cannot be traced is told at once.
    """
    pids = list(arguments["pids"])
    run_seconds = PERIOD_SECONDS * arguments["percent"] / 100
    told = False
    while pids:
        tracers = [Tracer(pid) for pid in pids]
        for tracer in tracers:
            try:
                tracer.stop()
            except CannotTrace:
                if not told:
                    raise
        if not told:
            ready()
            told = True
        time.sleep(PERIOD_SECONDS - run_seconds)
        for tracer in tracers:
            tracer.close()
        time.sleep(run_seconds)
        pids = [pid for pid in pids if threads(pid)]
