"""Faults of placement: processes on the wrong NUMA node."""

import os
import re
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, List, Optional, Set, Tuple

from chaosgpu.changes.affinity import ThreadAffinity, cpu_list, mask_of
from chaosgpu.changes.base import Change, start_time_ticks
from chaosgpu.changes.errors import BadArgument, NoEffect
from chaosgpu.changes.file_value import read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.faults import params
from chaosgpu.faults.base import Declaration, Fault, Survey, fault
from chaosgpu.faults.target import Process, select, target
from chaosgpu.helpers.tracer import threads

NODES = "/sys/devices/system/node"
LOOK_SECONDS = 0.2


def _cpus(path: str) -> Set[int]:
    return set(params.parse_cpu_list(read_file(path) or ""))


def numa_nodes() -> Dict[int, Set[int]]:
    """Each NUMA node with its CPUs that are online (sysfs-devices-node); memory-only nodes are left out."""
    online = _cpus("/sys/devices/system/cpu/online")
    found = {}
    for name in os.listdir(NODES) if os.path.isdir(NODES) else []:
        match = re.fullmatch(r"node(\d+)", name)
        if match:
            cpus = _cpus(f"{NODES}/{name}/cpulist") & online
            if cpus:
                found[int(match.group(1))] = cpus
    return found


def distances(node: int) -> List[int]:
    """The distances from a node to all nodes, in the order of their numbers (node<N>/distance)."""
    return [int(word) for word in (read_file(f"{NODES}/node{node}/distance") or "").split()]


def memory_nodes(pid: int) -> Dict[int, int]:
    """Pages a process has on each node (proc(5), numa_maps); {} where the kernel does not tell."""
    pages: Dict[int, int] = {}
    try:
        with open(f"/proc/{pid}/numa_maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                for node, count in re.findall(r" N(\d+)=(\d+)", line):
                    pages[int(node)] = pages.get(int(node), 0) + int(count)
    except OSError:
        return {}
    return pages


def _allowed(pid: int) -> Set[int]:
    """The CPUs of a process's cpuset, which the kernel would accept (cpuset.cpus.effective), else all online.

    In cgroup v2 the file is only where the controller is on: the nearest ancestor that has it rules.
    """
    for line in (read_file(f"/proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if number == "0" else ("/sys/fs/cgroup/cpuset",)
        names = ("cpuset.cpus.effective", "cpuset.effective_cpus")
        if number != "0" and "cpuset" not in controllers.split(","):
            continue
        while True:
            for found in (f"{root}{path.rstrip('/')}/{name}" for root in roots for name in names):
                text = read_file(found)
                if text:
                    return set(params.parse_cpu_list(text))
            if path == "/":
                break
            path = os.path.dirname(path)
    return _cpus("/sys/devices/system/cpu/online")


def _node(name: str, value: Any) -> str:
    number = isinstance(value, int) and not isinstance(value, bool)
    return params.text(r"remote|[0-9]{1,4}", '"remote" or a node number')(name, str(value) if number else value)


@fault
@dataclass(frozen=True)
class MisplaceProcesses(Fault):
    """Every thread of the chosen processes runs on CPUs of the wrong NUMA node, new threads too."""

    name: ClassVar[str] = "numa.misplace_processes"
    declaration: ClassVar[Declaration] = Declaration(
        layer="host",
        summary="moves all threads of processes to CPUs that are far from their memory",
        reversible="exact",
        takes_effect="now",
        scope="process",
        needs=("root",),
        certifies="that a rank on the wrong NUMA node is noticed, and what it costs the job",
        does_not_certify="memory on the wrong node: pages stay where they are, so remote access is what is made slow",
        residue="a daemon that a process started meanwhile and let go keeps the CPUs: nothing tells whose it was",
        metrics=("node_memory_numa_other_node_total", "node_memory_numa_numa_miss_total"),
        seen_on=("host", "guest"),
    )

    target: Dict[str, Any] = params.param(target, doc="which processes")
    cpus: Optional[List[int]] = params.param(params.number_list(8191), None, doc='CPUs, a list or "0-3,8"')
    numa_node: Optional[str] = params.param(_node, None, doc='"remote" or a node number')

    def check(self) -> None:
        if self.cpus is not None and self.numa_node is not None:
            raise BadArgument("give cpus or numa_node, not both")

    def survey(self, survey: Survey) -> None:
        placements = []
        for process in select(survey, self.target):
            wanted = self._wanted(survey, process)
            allowed = _allowed(process.pid)
            if wanted and not wanted <= allowed:
                survey.refuse(
                    f"process {process.pid} may run on CPUs {cpu_list(sorted(allowed))} by its cpuset,"
                    f" and not on {cpu_list(sorted(wanted - allowed))}: give cpus within it"
                )
            old = {str(tid): mask_of(tid) for tid in threads(process.pid)}
            old = {tid: mask for tid, mask in old.items() if mask}
            main = old.get(str(process.pid))
            if main is None or not wanted:
                continue
            if all(set(mask) <= wanted for mask in old.values()):
                survey.refuse(f"process {process.pid} is on CPUs {cpu_list(main)} already: give others")
            placements.append(
                {"pid": process.pid, "start": process.start, "wanted": sorted(wanted), "old": old, "old_default": main}
            )
        survey.facts["placements"] = placements
        survey.facts["since_ticks"] = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def _wanted(self, survey: Survey, process: Process) -> Set[int]:
        """The CPUs to move a process to; an empty set when that was refused."""
        if self.cpus is not None:
            missing = set(self.cpus) - _cpus("/sys/devices/system/cpu/online")
            if missing:
                survey.refuse(f"CPUs {cpu_list(sorted(missing))} are not online on this machine")
            return set() if missing else set(self.cpus)
        nodes = numa_nodes()
        if self.numa_node not in (None, "remote"):
            node = int(self.numa_node or 0)
            if node not in nodes:
                survey.refuse(f"numa_node {node} has no CPUs: {', '.join(map(str, sorted(nodes)))} have")
            return nodes.get(node, set())
        if len(nodes) < 2:
            survey.refuse("this machine has one NUMA node, so none is remote: give cpus")
            return set()
        home, by = _home(process, nodes)
        apart = distances(home)
        remote = max(
            (node for node in nodes if node != home), key=lambda node: (apart[node] if node < len(apart) else 0, node)
        )
        survey.facts.setdefault("homes", {})[str(process.pid)] = {"home": home, "by": by, "remote": remote}
        return nodes[remote]

    def changes(self, survey: Survey) -> List[Change]:
        since = survey.facts["since_ticks"]
        return [
            ThreadAffinity(entry["pid"], entry["start"], entry["wanted"], entry["old_default"], since, entry["old"])
            for entry in survey.facts["placements"]
        ]

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        time.sleep(LOOK_SECONDS)
        shown = {}
        for entry in facts["placements"]:
            pid = entry["pid"]
            if start_time_ticks(pid) != entry["start"]:
                continue
            lists = {_allowed_list(pid, tid) for tid in threads(pid)} - {""}
            if any(set(params.parse_cpu_list(listed)) - set(entry["wanted"]) for listed in lists):
                raise NoEffect(f"a thread of process {pid} may still run on CPUs {', '.join(sorted(lists))}")
            shown[str(pid)] = {"cpus_allowed": sorted(lists), "last_ran_on": sorted(_last_cpus(pid))}
        if not shown:
            raise NoEffect("every chosen process ended while it was being moved")
        return {"placements": shown}

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        found = {}
        for entry in facts["placements"]:
            if start_time_ticks(entry["pid"]) == entry["start"]:
                found[str(entry["pid"])] = _allowed_list(entry["pid"], entry["pid"])
        return {"cpus_allowed": found}


def _home(process: Process, nodes: Dict[int, Set[int]]) -> Tuple[int, str]:
    """The node a process belongs to, by most of its memory, else by most of the CPUs it may run on; and by which."""
    pages = {node: count for node, count in memory_nodes(process.pid).items() if node in nodes}
    if pages:
        return max(sorted(pages), key=lambda node: pages[node]), "memory"
    mask = set(mask_of(process.pid))
    return max(sorted(nodes), key=lambda node: len(nodes[node] & mask)), "cpus"


def _allowed_list(pid: int, tid: int) -> str:
    """Cpus_allowed_list of a thread, as /proc shows it to everyone; "" when it is gone."""
    for line in (read_file(f"/proc/{pid}/task/{tid}/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return line.split()[1]
    return ""


def _last_cpus(pid: int) -> Set[int]:
    """The CPUs that the threads last ran on (proc(5), stat field 39)."""
    found = set()
    for tid in threads(pid):
        fields = (read_file(f"/proc/{pid}/task/{tid}/stat") or "").rpartition(")")[2].split()
        if len(fields) > 36:
            found.add(int(fields[36]))
    return found
