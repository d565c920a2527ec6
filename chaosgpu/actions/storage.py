"""Actions on storage: a full filesystem, slow reads and writes."""

from typing import Any, Dict, List

from chaoslib.types import Configuration, Secrets

from chaosgpu.fleet.inject import inject

__all__ = ["fill_disk", "throttle_io"]


def fill_disk(
    path: str,
    duration: str,
    percent: float = None,
    bytes: int = None,
    leave_bytes: int = None,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Fill the filesystem that ``path`` is on; the space returns when the fault ends or its holder dies.

    One of ``percent`` (df's Use% to reach, reserved blocks counted as df does), ``bytes`` (how much to take) and
    ``leave_bytes`` (how much to leave to users); sizes also as "10GiB". Never the filesystem of /, logs, swap or the
    ledger. By fallocate(2) on an unnamed file, open(2) O_TMPFILE. ``allow`` knows kubelet_eviction, memory_filesystem.
    """
    return inject(
        "storage.fill_disk",
        {"path": path, "percent": percent, "bytes": bytes, "leave_bytes": leave_bytes},
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )


def throttle_io(
    target: Dict[str, Any],
    duration: str,
    device: str = None,
    path: str = None,
    read_bytes_per_second: int = None,
    write_bytes_per_second: int = None,
    read_iops: int = None,
    write_iops: int = None,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Cap how fast the cgroup of some processes reads or writes one block device.

    ``target`` as for pause_processes: the cgroups of the chosen processes are slowed, with everyone in them. The device
    by its node (``device``) or by a ``path`` on it. Rates in bytes per second, also as "10MiB", or in operations per
    second. By io.max of cgroup v2; where only v1 is there by blkio.throttle, which buffered writes escape.
    """
    return inject(
        "storage.throttle_io",
        {
            "target": target,
            "device": device,
            "path": path,
            "read_bytes_per_second": read_bytes_per_second,
            "write_bytes_per_second": write_bytes_per_second,
            "read_iops": read_iops,
            "write_iops": write_iops,
        },
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )
