"""How the lab is: each part's health, and where an experiment finds it."""

from typing import Any

from chaosgpu.lab import monitoring
from chaosgpu.lab.cgroups import RANKS
from chaosgpu.lab.cluster import HEALTHY_STEPS_PER_SECOND, STEP_RATE, Cluster
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.place import Place
from chaosgpu.lab.services import Service


def status() -> dict[str, Any]:
    """The lab as plain JSON: ``state`` ("up", "down" or "partial"), ``components`` and what experiments use.

    Reads only, and needs no root. A component is ``{"name", "healthy", "detail"}``, a process has ``pid`` too.
    """
    place = Place()
    found: dict[str, Any] = {"state": "down", "directory": str(place.directory), "components": []}
    if not place.directory.exists():
        return found
    cluster = Cluster(place)
    components = [
        _groups(cluster),
        _volume(cluster),
        _network(cluster),
        _process(cluster, cluster.node_exporter, "/metrics"),
        *(_rank(cluster, rank) for rank in RANKS),
        _process(cluster, cluster.prometheus, "/-/ready"),
        _job(cluster),
    ]
    found["state"] = "up" if all(component["healthy"] for component in components) else "partial"
    found["components"] = components
    if cluster.prometheus.pid() is not None:
        found |= cluster.variables()
        found["variables"] = str(place.variables)
    found["cgroups"] = {f"rank{rank}": [str(group) for group in cluster.groups.of(rank)] for rank in RANKS}
    found["logs"] = str(place.logs)
    device = str(found.get("checkpoint_device", "")).removeprefix("/dev/")
    found["queries"] = {
        "training steps per second": STEP_RATE,
        "loss": "max(training_loss)",
        "slowest checkpoint, seconds": "max(training_checkpoint_seconds)",
        "waiting for the other rank, seconds": "training_allreduce_seconds",
        "ranks that answer": 'sum(up{job="training"})',
        "volume, bytes written per second": f'rate(node_disk_written_bytes_total{{device="{device}"}}[5s])',
        "volume, bytes free": f'node_filesystem_avail_bytes{{mountpoint="{place.checkpoints}"}}',
    }
    return found


def _component(name: str, healthy: bool, detail: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "healthy": healthy, "detail": detail, **more}


def _groups(cluster: Cluster) -> dict[str, Any]:
    names = ", ".join(cluster.groups.relative(rank) for rank in RANKS)
    return _component("cgroups", cluster.groups.healthy(), names)


def _volume(cluster: Cluster) -> dict[str, Any]:
    mount = cluster.volume.mounted()
    detail = f"{cluster.place.checkpoints} on {mount.device} ({mount.number})" if mount else "not mounted"
    return _component("checkpoint volume", cluster.volume.healthy(), detail)


def _network(cluster: Cluster) -> dict[str, Any]:
    if cluster.record.no_network:
        return _component("network", True, f"loopback: {cluster.record.no_network}")
    homes = [rank for rank in RANKS if (pid := cluster.ranks[rank].pid()) and cluster.network.holds(rank, pid)]
    return _component("network", len(homes) == len(RANKS), f"nsenter --net={cluster.network.of(0)}, and rank1")


def _process(cluster: Cluster, service: Service, path: str) -> dict[str, Any]:
    pid = service.pid()
    if pid is None:
        return _component(service.name, False, f"not running: {service.last_words()}")
    try:
        monitoring.get(cluster.url(service) + path)
    except LabError as error:
        return _component(service.name, False, str(error), pid=pid)
    return _component(service.name, True, cluster.url(service), pid=pid)


def _rank(cluster: Cluster, rank: int) -> dict[str, Any]:
    service = cluster.ranks[rank]
    if service.stopped():
        return _component(service.name, False, "stopped by a signal or a tracer", pid=service.pid())
    if service.pid() is not None and not cluster.at_home(rank):
        return _component(service.name, False, "not in its cgroup or network namespace", pid=service.pid())
    return _process(cluster, service, "/metrics")


def _job(cluster: Cluster) -> dict[str, Any]:
    try:
        rate = monitoring.value(cluster.url(cluster.prometheus), STEP_RATE)
    except (LabError, KeyError):
        rate = None
    healthy = rate is not None and rate >= HEALTHY_STEPS_PER_SECOND
    return _component("training job", healthy, "no step seen" if rate is None else f"{rate:.1f} steps/s in Prometheus")
