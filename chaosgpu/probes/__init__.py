"""What an experiment observes: ``"module": "chaosgpu.probes", "func": "metric_holds"``."""

from chaosgpu.probes.faults import faults_active, list_faults
from chaosgpu.probes.prometheus import (
    capture_baseline,
    metric_changed,
    metric_holds,
    metric_value,
    wait_for_metric,
)

__all__ = [
    "capture_baseline",
    "faults_active",
    "list_faults",
    "metric_changed",
    "metric_holds",
    "metric_value",
    "wait_for_metric",
]
