"""What an experiment injects. ``chaosgpu.actions`` is the documented module; families are re-exported here."""

from chaosgpu.actions.host import kill_processes, pause_processes, slow_processes
from chaosgpu.actions.numa import misplace_processes
from chaosgpu.actions.rdma import impair_network
from chaosgpu.actions.storage import fill_disk, throttle_io

__all__ = [
    "fill_disk",
    "impair_network",
    "kill_processes",
    "misplace_processes",
    "pause_processes",
    "slow_processes",
    "throttle_io",
]
