"""Actions on placement: processes on the wrong NUMA node."""

from typing import Any, Dict, List

from chaoslib.types import Configuration, Secrets

from chaosgpu.fleet.inject import inject

__all__ = ["misplace_processes"]


def misplace_processes(
    target: Dict[str, Any],
    duration: str,
    cpus: List[int] = None,
    numa_node: str = None,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Move every thread of processes to CPUs of the wrong NUMA node, threads born meanwhile too.

    ``target`` as for pause_processes. ``cpus`` is a list or text such as "0-3,8"; ``numa_node`` a node's number, or
    "remote" (the default): the node farthest from where most of the process's memory lies. A process's cpuset is
    respected. By sched_setaffinity(2), each thread's own mask is put back.
    """
    return inject(
        "numa.misplace_processes",
        {"target": target, "cpus": cpus, "numa_node": numa_node},
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )
