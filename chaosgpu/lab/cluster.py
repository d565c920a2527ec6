"""Bring the rehearsal cluster up and take it down."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from chaosgpu.lab import monitoring
from chaosgpu.lab.cgroups import RANKS, Groups, hierarchies
from chaosgpu.lab.commands import found, run
from chaosgpu.lab.debian import place_of, unpack
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.network import ADDRESSES, Network
from chaosgpu.lab.place import Place, write_atomically
from chaosgpu.lab.services import Service
from chaosgpu.lab.volume import Volume

# Below the range from which the kernel takes ports for outgoing connections, so that these stay free.
FIRST_PORTS = {"prometheus": 9490, "node_exporter": 9500, "rank0": 9510, "rank1": 9520, "training": 29500}
PORTS_TRIED = 500
PACKAGES = ("prometheus", "prometheus-node-exporter")
READY_LIMIT_SECONDS = 30
RATE_WINDOW_SECONDS = 4
STEP_RATE = f"min(rate(training_steps_total[{RATE_WINDOW_SECONDS}s]))"
# Of 20; a busy machine is given some room, and `up` waits for more than what counts as healthy afterwards.
STEADY_STEPS_PER_SECOND = 14
HEALTHY_STEPS_PER_SECOND = 10


@dataclass(frozen=True)
class Step:
    """One step of `up` or `down`: told when it begins (outcome "begins") and when it ends."""

    name: str
    outcome: str  # begins, made, kept, missing, removed, absent
    detail: str = ""
    seconds: float = 0.0


Progress = Callable[[Step], None]


class Cluster:
    """The parts of the lab in one place, by what is on record there."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.record = place.load()
        self.groups = Groups(place, self.record)
        self.volume = Volume(place)
        self.network = Network(place)
        self.ranks = [Service(f"rank{rank}", place.directory) for rank in RANKS]
        self.node_exporter = Service("node_exporter", place.directory)
        self.prometheus = Service("prometheus", place.directory)

    def url(self, service: Service) -> str:
        """Where a service answers."""
        return f"http://127.0.0.1:{self.record.ports[service.name]}"

    def at_home(self, rank: int) -> bool:
        """Whether a rank runs, in the cgroups and the namespace that are its own."""
        pid = self.ranks[rank].pid()
        if pid is None or (not self.record.no_network and not self.network.holds(rank, pid)):
            return False
        homes = self.groups.of(rank)
        return all(str(pid) in (home / "cgroup.procs").read_text(encoding="ascii").split() for home in homes)

    def variables(self) -> dict[str, str]:
        """What an experiment needs to know, as the toolkit's ``--var-file`` brings it in."""
        mount = self.volume.mounted()
        return {
            "prometheus_base_url": self.url(self.prometheus),
            "checkpoints": str(self.place.checkpoints),
            "checkpoint_device": mount.device if mount else "",
            **{f"rank{rank}_cgroup": self.groups.relative(rank) for rank in RANKS},
        }


def up(progress: Progress) -> None:
    """Make the lab, or what is missing of it. Done twice it changes nothing.

    :raises LabError: this machine cannot hold a lab (a line for each reason), or a part of it does not come up.
    """
    _refuse_without_means()
    place = Place()
    with place.locked(lambda: progress(Step("lock", "begins", "another lab command is at work"))) as lock:
        cluster = Cluster(place)
        for name, make in (
            ("packages", _packages),
            ("cgroups", _groups),
            ("checkpoint volume", _volume),
            ("network", _network),
            ("node_exporter", _node_exporter),
            ("training job", _ranks),
            ("prometheus", _prometheus),
            ("steady state", _steady_state),
        ):
            with _step(progress, name) as end:
                end(*make(cluster, lock))


def down(progress: Progress) -> None:
    """Take down all that `up` made, and nothing else. Safe when there is nothing, or only half of it.

    :raises LabError: something of the lab is in use by someone else's process.
    """
    place = Place()
    if not place.directory.exists():
        progress(Step("lab", "absent", f"nothing at {place.directory}"))
        return
    if os.geteuid() != 0:
        raise LabError("the lab was made by root: run down as root")
    with place.locked(lambda: progress(Step("lock", "begins", "another lab command is at work"))) as lock:
        cluster = Cluster(place)
        steps: list[tuple[str, Callable[[], bool]]] = [
            (service.name, service.stop)
            for service in (cluster.prometheus, *reversed(cluster.ranks), cluster.node_exporter)
        ]
        steps += [
            ("network", lambda: cluster.network.remove(lock)),
            ("checkpoint volume", lambda: cluster.volume.remove(lock)),
            ("cgroups", cluster.groups.remove),
        ]
        for name, remove in steps:
            with _step(progress, name) as end:
                end("removed" if remove() else "absent", "")
        with _step(progress, "lab directory") as end:
            place.delete()
            end("removed", str(place.directory))


def _refuse_without_means() -> None:
    if sys.platform != "linux":
        raise LabError("the lab needs Linux: faults are made of what its kernel offers")
    if os.geteuid() != 0:
        raise LabError("not root: the lab mounts a volume and makes cgroups and namespaces; run it with sudo")
    why = []
    for tool, package in (("mkfs.ext4", "e2fsprogs"), ("mount", "mount"), ("setsid", "util-linux")):
        if not found(tool):
            why.append(f"{tool} is not installed, and the checkpoint volume needs it: apt-get install {package}")
    if not Path("/dev/loop-control").exists():
        why.append("no loop devices (/dev/loop-control): modprobe loop, or in a container run it privileged")
    try:
        hierarchies()
    except LabError as error:
        why.append(str(error))
    if not why:
        with open(os.devnull, "rb") as nothing:
            try:
                run(nothing.fileno(), "unshare", "--mount", "true")
            except LabError as error:
                why.append(f"mounting is not allowed here ({error}): in a container, run it privileged")
    if why:
        raise LabError("\n".join(why))


def _packages(cluster: Cluster, lock: int) -> tuple[str, str]:
    # First, since without them there is nothing to rehearse with, and the archive may be out of reach.
    fetched = False
    for package in PACKAGES:
        if not place_of(package).is_dir():
            unpack(package)
            fetched = True
    return _made(fetched), ", ".join(PACKAGES)


def _groups(cluster: Cluster, lock: int) -> tuple[str, str]:
    return _made(cluster.groups.ensure()), f"{cluster.groups.relative(0)} and rank1"


def _volume(cluster: Cluster, lock: int) -> tuple[str, str]:
    made = cluster.volume.ensure(lock)
    mount = cluster.volume.mounted()
    return _made(made), f"{cluster.place.checkpoints} on {mount.device if mount else 'nothing'}"


def _network(cluster: Cluster, lock: int) -> tuple[str, str]:
    cluster.record.no_network = cluster.network.missing(lock) or ""
    cluster.place.save(cluster.record)
    if cluster.record.no_network:
        return (
            "missing",
            f"{cluster.record.no_network}: the ranks talk over loopback, and only their link cannot be hurt",
        )
    return _made(cluster.network.ensure(lock)), " -- ".join(ADDRESSES)


def _node_exporter(cluster: Cluster, lock: int) -> tuple[str, str]:
    service = cluster.node_exporter
    if service.pid() is not None:
        return "kept", cluster.url(service)
    _reserve(cluster, service.name).close()
    service.start(lock, monitoring.node_exporter_command(cluster.record.ports[service.name]))
    _wait_for_answer(service, cluster.url(service))
    return "made", cluster.url(service)


def _ranks(cluster: Cluster, lock: int) -> tuple[str, str]:
    away = [rank for rank in RANKS if not cluster.at_home(rank)]
    for rank in away:
        cluster.ranks[rank].stop()
    if away and (cluster.record.no_network or "training" not in cluster.record.ports):
        _reserve(cluster, "training").close()
    for rank in away:
        with _reserve(cluster, cluster.ranks[rank].name) as listener:
            listener.listen()
            wire = [] if cluster.record.no_network else ["nsenter", f"--net={cluster.network.of(rank)}"]
            program = [sys.executable, "-m", "chaosgpu.lab.training", "--rank", str(rank)]
            program += ["--address", "127.0.0.1" if cluster.record.no_network else ADDRESSES[0]]
            program += [
                "--port",
                str(cluster.record.ports["training"]),
                "--checkpoints",
                str(cluster.place.checkpoints),
            ]
            # The socket stays in the machine's own namespace, where Prometheus is, while the rank goes to the lab's.
            program += ["--metrics-fd", str(listener.fileno())]
            groups = cluster.groups.of(rank)
            cluster.ranks[rank].start(lock, wire + program, groups, handed_down=(listener.fileno(),))
    return _made(bool(away)), ", ".join(f"{rank.name} pid {rank.pid()}" for rank in cluster.ranks)


def _prometheus(cluster: Cluster, lock: int) -> tuple[str, str]:
    service = cluster.prometheus
    directory = cluster.place.directory / "prometheus"
    file = directory / "prometheus.yml"
    wanted = monitoring.prometheus_configuration(cluster.record.ports)
    if service.pid() is not None and file.exists() and file.read_text(encoding="utf-8") == wanted:
        return "kept", cluster.url(service)
    service.stop()
    directory.mkdir(exist_ok=True)
    write_atomically(file, wanted)
    _reserve(cluster, service.name).close()
    service.start(lock, monitoring.prometheus_command(directory, cluster.record.ports[service.name]))
    _wait_for_answer(service, f"{cluster.url(service)}/-/ready")
    return "made", cluster.url(service)


def _steady_state(cluster: Cluster, lock: int) -> tuple[str, str]:
    # What the ranks did before they were started anew says nothing: the rate's window must lie after that.
    started = max(rank.record.stat().st_mtime for rank in cluster.ranks)
    time.sleep(min(RATE_WINDOW_SECONDS, max(0.0, started + RATE_WINDOW_SECONDS - time.time())))
    deadline = time.monotonic() + READY_LIMIT_SECONDS
    rate: float | None = None
    while time.monotonic() < deadline:
        rate = monitoring.value(cluster.url(cluster.prometheus), STEP_RATE)
        if rate is not None and rate >= STEADY_STEPS_PER_SECOND:
            write_atomically(
                cluster.place.variables, json.dumps({"configuration": cluster.variables()}, indent=1) + "\n"
            )
            return "kept", f"{rate:.1f} steps/s in Prometheus; variables in {cluster.place.variables}"
        time.sleep(0.25)
    for rank in cluster.ranks:
        if rank.pid() is None:
            raise LabError(f"{rank.name} has ended: {rank.last_words()}")
        if rank.stopped():
            raise LabError(
                f"{rank.name} (pid {rank.pid()}) is stopped: end the fault that holds it, or run down, then up"
            )
    seen = "no step" if rate is None else f"{rate:.1f} steps/s"
    raise LabError(
        f"the job makes {seen} instead of {STEADY_STEPS_PER_SECOND} or more after {READY_LIMIT_SECONDS} s: a fault may "
        f"still be on, or the machine is busy; its log is {cluster.ranks[0].log}"
    )


def _reserve(cluster: Cluster, name: str) -> socket.socket:
    """Bind the port on record, or the next free one, on loopback, and have it on record."""
    first = cluster.record.ports.get(name, FIRST_PORTS[name])
    for port in range(first, first + PORTS_TRIED):
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", port))
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise LabError(f"{name}: 127.0.0.1:{port}: {error.strerror}") from error
            continue
        # SO_REUSEADDR lets a listener on 0.0.0.0 pass; listening tells.
        try:
            bound.listen()
        except OSError:
            bound.close()
            continue
        cluster.record.ports[name] = port
        cluster.place.save(cluster.record)
        return bound
    raise LabError(f"{name}: no free port on 127.0.0.1 from {first} to {first + PORTS_TRIED - 1}")


def _wait_for_answer(service: Service, url: str) -> None:
    deadline = time.monotonic() + READY_LIMIT_SECONDS
    while True:
        try:
            monitoring.get(url)
            return
        except LabError as error:
            if service.pid() is None:
                raise LabError(f"{service.name} has ended: {service.last_words()}") from error
            if time.monotonic() > deadline:
                raise LabError(f"{service.name} does not answer after {READY_LIMIT_SECONDS} s: {error}") from error
        time.sleep(0.05)


def _made(made: bool) -> str:
    return "made" if made else "kept"


@contextmanager
def _step(progress: Progress, name: str) -> Iterator[Callable[[str, str], None]]:
    progress(Step(name, "begins"))
    begun = time.monotonic()
    ended: list[Step] = []
    yield lambda outcome, detail: ended.append(Step(name, outcome, detail))
    progress(replace(ended[0], seconds=time.monotonic() - begun))
