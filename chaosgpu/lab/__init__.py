"""The rehearsal cluster on one machine: a training job, its storage and network, and a real Prometheus that sees it."""

from chaosgpu.lab.cluster import Progress, Step, down, up
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.health import status

__all__ = ["LabError", "Progress", "Step", "down", "status", "up"]
