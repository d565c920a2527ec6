"""A stop-and-go cycle: processes run for a share of each period and stand still for the rest, held by ptrace.

When this helper dies, whatever killed it, the kernel lets them run (chaosgpu.helpers.tracer).
"""

import time
from typing import Any, Callable, Dict, List

from chaosgpu.helpers.tracer import CannotTrace, Tracer, start_time_ticks

PERIOD_SECONDS = 0.1
_LOOK_SECONDS = 0.002
_LONGEST_STAND_SECONDS = 1.0


def run(arguments: Dict[str, Any], ready: Callable[[], Any]) -> None:
    """Slow the ``arguments["processes"]``, each [pid, start], to ``arguments["percent"]`` of the time, until killed or
    all of them have ended.

    The first stop of each process comes before ``ready``: one that cannot be traced is told at once.
    """
    tracers = [Tracer(pid, start) for pid, start in arguments["processes"]]
    run_seconds = PERIOD_SECONDS * arguments["percent"] / 100
    stand_seconds = PERIOD_SECONDS - run_seconds
    told = False
    ran_from = time.monotonic()
    while tracers:
        for tracer in tracers:
            try:
                tracer.stop()
            except CannotTrace:
                if not told:
                    raise
        # On a busy machine they run on until it is our turn: they stand still for as much longer.
        late = (time.monotonic() - ran_from) / run_seconds if told else 1.0
        if not told:
            ready()
            told = True
        time.sleep(min(max(1.0, late) * stand_seconds, _LONGEST_STAND_SECONDS))
        ran_from = time.monotonic()
        _let_run(tracers, run_seconds)
        tracers = [tracer for tracer in tracers if start_time_ticks(tracer.pid) == tracer.start]


def _let_run(tracers: List[Tracer], seconds: float) -> None:
    """Let all go on for a while, also a thread that was in D state and stops only now."""
    give_up = time.monotonic() + seconds
    while True:
        late = [tracer for tracer in tracers if not tracer.close()]
        left = give_up - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LOOK_SECONDS) if late else left)
