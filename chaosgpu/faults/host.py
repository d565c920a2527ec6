"""Faults on processes of a machine: paused, killed, slowed."""

import os
import time
from dataclasses import dataclass
from typing import Any, Callable, ClassVar, Dict, List, Optional, Tuple, Union

from chaosgpu.changes.base import Change, start_time_ticks
from chaosgpu.changes.cgroup import (
    ChildCgroup,
    ControllerEnabled,
    MovedProcesses,
    controller_key,
    members,
    members_below,
)
from chaosgpu.changes.errors import ChangeFailed, NoEffect
from chaosgpu.changes.file_value import FileValue, inode_of, read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.helper import HelperProcess
from chaosgpu.changes.process import SignalSent, StoppedByPtrace, StoppedBySignal
from chaosgpu.faults import params
from chaosgpu.faults.base import Declaration, Fault, Survey, fault
from chaosgpu.faults.cgroups import Hierarchy, directory_of, hierarchy
from chaosgpu.faults.target import Process, read_processes, select, target
from chaosgpu.helpers.tracer import state_of, state_of_thread, threads, tracer_of, why_not_trace

LOOK_SECONDS = 0.2
PERIOD_US = 100000  # the kernel's default period of CPU bandwidth control (sched-bwc.rst)
SIGNALS = ("TERM", "KILL", "INT", "HUP", "QUIT", "ABRT", "SEGV", "BUS", "USR1", "USR2", "ALRM", "PIPE")
GPU_DEVICES = "/dev/nvidia"


def cpu_seconds(pid: int) -> Optional[float]:
    """User and system time a process has used (proc(5), stat fields 14 and 15); None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _identified(facts: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The surveyed processes that still are themselves."""
    return [entry for entry in facts["processes"] if start_time_ticks(entry["pid"]) == entry["start"]]


@fault
@dataclass(frozen=True)
class PauseProcesses(Fault):
    """Processes stand still, with all their threads, and go on where they were."""

    name: ClassVar[str] = "host.pause_processes"
    declaration: ClassVar[Declaration] = Declaration(
        layer="host",
        summary="stops processes by ptrace, or by SIGSTOP where they cannot be traced",
        reversible="exact",
        takes_effect="now",
        scope="process",
        needs=("root", "CAP_SYS_PTRACE"),
        certifies="how the rest of a job or service bears a member that is alive and does nothing",
        does_not_certify="a crash, a lost node, or a slow member: connections stay open and nothing is refused",
        metrics=("namedprocess_namegroup_states", "node_procs_running"),
        residue="time that passed meanwhile (timers, leases and connections may have expired); a waiting epoll_wait(2),"
        " semop(2) or io_getevents(2) returns EINTR, as after any stop (signal(7))",
        seen_on=("host", "guest"),
    )

    target: Dict[str, Any] = params.param(target, doc="which processes")

    def survey(self, survey: Survey) -> None:
        by_signal = []
        for process in select(survey, self.target):
            if process.state in ("T", "t"):
                survey.refuse(f"process {process.pid} ({process.command[:60]}) is stopped already")
            untraceable = _untraceable(process.pid)
            if untraceable:
                by_signal.append(process.pid)
                survey.warnings.append(
                    f"process {process.pid} is stopped by SIGSTOP, since {untraceable}:"
                    " it would stay stopped if every process of chaosgpu were killed at once"
                )
        survey.facts["by_signal"] = by_signal

    def changes(self, survey: Survey) -> List[Change]:
        by_signal = set(survey.facts["by_signal"])
        return [
            (StoppedBySignal if entry["pid"] in by_signal else StoppedByPtrace)(entry["pid"], entry["start"])
            for entry in survey.facts["processes"]
        ]

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        before = {entry["pid"]: cpu_seconds(entry["pid"]) for entry in _identified(facts)}
        time.sleep(LOOK_SECONDS)
        grip.tend()
        states = {}
        for entry in _identified(facts):
            pid = entry["pid"]
            found = {state_of_thread(pid, tid) for tid in threads(pid)} - {""}
            states[str(pid)] = "".join(sorted(found))
            # One in D state runs nothing, and stops as soon as its wait ends.
            if not found & {"t", "T"} or found - {"t", "T", "D", "Z", "X"}:
                raise NoEffect(f"process {pid} has threads in states {', '.join(sorted(found))} and is not stopped")
            if cpu_seconds(pid) != before.get(pid):
                raise NoEffect(f"process {pid} used CPU time while it was stopped")
        if not states:
            raise NoEffect("every chosen process ended while it was being stopped")
        return {"states": states, "cpu_seconds_used": 0.0, "looked_seconds": LOOK_SECONDS}

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        states = {str(entry["pid"]): state_of(entry["pid"]) for entry in _identified(facts)}
        still = [pid for pid, state in states.items() if state == "t" and tracer_of(int(pid)) == os.getpid()]
        if still:
            raise ChangeFailed(f"processes {', '.join(still)} are still held")
        return {"states": states}


def _untraceable(pid: int) -> str:
    """Why a process cannot be held by ptrace; "" when it can."""
    tracer = tracer_of(pid)
    return f"process {tracer} traces it" if tracer else why_not_trace()


@fault
@dataclass(frozen=True)
class KillProcesses(Fault):
    """Processes get a signal; what died, and what came back, is told."""

    name: ClassVar[str] = "host.kill_processes"
    declaration: ClassVar[Declaration] = Declaration(
        layer="host",
        summary="sends a signal to processes, and SIGKILL after a grace where one is given",
        reversible="one-shot",
        takes_effect="now",
        scope="process",
        needs=("root",),
        certifies="that a death is noticed and that the workload's own supervisor brings it back",
        does_not_certify="a node that dies: the kernel still closes the process's connections and files",
        metrics=(
            "namedprocess_namegroup_num_procs",
            "node_systemd_unit_state",
            "kube_pod_container_status_restarts_total",
        ),
        danger="service",
        residue="the processes are gone: restarting is the workload's part",
        opt_outs=("kill_gpu_client",),
        seen_on=("host",),
    )

    target: Dict[str, Any] = params.param(target, doc="which processes")
    signal: str = params.param(params.choice(*SIGNALS), "TERM", doc="the signal, without SIG")
    grace_seconds: Optional[float] = params.param(params.seconds(0, 600), None, doc="then SIGKILL to who is alive")
    watch_seconds: float = params.param(params.seconds(0, 60), 1.0, doc="how long to look for who comes back")

    def survey(self, survey: Survey) -> None:
        for process in select(survey, self.target):
            if "KILL" in (self.signal, "KILL" if self.grace_seconds is not None else "") and _holds_gpu(process.pid):
                survey.refuse(
                    f"process {process.pid} holds {GPU_DEVICES}*, and SIGKILL of a GPU client can freeze the GPU",
                    unless="kill_gpu_client",
                )

    def changes(self, survey: Survey) -> List[Change]:
        processes = [[entry["pid"], entry["start"]] for entry in survey.facts["processes"]]
        return [SignalSent(processes, self.signal, self.grace_seconds)]

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        commands = {entry["command"] for entry in facts["processes"]}
        chosen = {(entry["pid"], entry["start"]) for entry in facts["processes"]}
        born_after = max(start for _, start in chosen)
        give_up = time.monotonic() + self.watch_seconds
        back: List[Process] = []
        while True:
            alive = _identified(facts)
            back = [
                process
                for process in read_processes()
                if process.command[:200] in commands
                and (process.pid, process.start) not in chosen
                and process.start > born_after
            ]
            if time.monotonic() > give_up or (not alive and len(back) >= len(chosen)):
                break
            time.sleep(0.05)
        died = [entry["pid"] for entry in facts["processes"] if entry not in alive]
        if not died and self.signal not in ("HUP", "USR1", "USR2", "ALRM", "PIPE"):
            raise NoEffect(
                f"no process died of SIG{self.signal} in {self.watch_seconds:g} s: give grace_seconds to follow with"
                " SIGKILL, or a longer watch_seconds"
            )
        return {
            "died": died,
            "still_alive": [entry["pid"] for entry in alive],
            "came_back": [{"pid": process.pid, "command": process.command[:200]} for process in back],
        }


def _holds_gpu(pid: int) -> bool:
    try:
        return any(
            os.readlink(f"/proc/{pid}/fd/{name}").startswith(GPU_DEVICES) for name in os.listdir(f"/proc/{pid}/fd")
        )
    except OSError:
        return False


@fault
@dataclass(frozen=True)
class SlowProcesses(Fault):
    """Processes get less CPU time: together at most ``percent`` of one CPU (cgroup), or of their own time (duty)."""

    name: ClassVar[str] = "host.slow_processes"
    declaration: ClassVar[Declaration] = Declaration(
        layer="host",
        summary="caps CPU time by the cgroup CPU controller, or by a stop-and-go cycle",
        reversible="exact",
        takes_effect="now",
        scope="process",
        needs=("root", "cgroup:cpu"),
        certifies="how a job bears a straggler: one member that is slow and answers late",
        does_not_certify="a slow GPU, disk or network: only time on the CPU is taken",
        metrics=("container_cpu_cfs_throttled_periods_total", "node_pressure_cpu_waiting_seconds_total"),
        seen_on=("host", "guest"),
    )

    target: Dict[str, Any] = params.param(target, doc="which processes")
    percent: float = params.param(
        params.percent(1, 99), doc="of one CPU, for all of them together; duty: of their time"
    )
    how: str = params.param(params.choice("auto", "cgroup", "duty"), "auto", doc="auto: cgroup where that works")

    def survey(self, survey: Survey) -> None:
        chosen = select(survey, self.target)
        facts = survey.facts
        plan = _cap_plan(survey, chosen, self.percent) if self.how != "duty" else "how is duty"
        if isinstance(plan, str):
            if self.how == "cgroup":
                survey.refuse(f"CPU time cannot be capped by cgroup: {plan} (how: 'duty' works without)")
            facts["how"] = "duty"
            for process in chosen:
                if process.state in ("T", "t"):
                    survey.refuse(f"process {process.pid} is stopped already")
                untraceable = _untraceable(process.pid)
                if untraceable:
                    survey.refuse(f"process {process.pid} cannot be slowed by duty: {untraceable}")
            if self.how == "auto":
                survey.warnings.append(f"a stop-and-go cycle is used, since {plan}")
        else:
            facts["how"], facts["plan"] = "cgroup", plan

    def changes(self, survey: Survey) -> List[Change]:
        facts = survey.facts
        if facts["how"] == "duty":
            processes = [[entry["pid"], entry["start"]] for entry in facts["processes"]]
            keys = [f"process:{pid}/{start}" for pid, start in processes]
            return [HelperProcess("duty", keys, {"processes": processes, "percent": self.percent})]
        plan = facts["plan"]
        changes: List[Change] = []
        if plan["enable_in"]:
            changes.append(ControllerEnabled(plan["enable_in"], "cpu"))
        if plan["child"]:
            changes.append(ChildCgroup(plan["child"]))
        limit = (plan["file"], plan["old_limit"], plan["limit"], plan["inode"])
        changes.append(FileValue(*limit, f"cgroup:{plan['group']}", plan["relies_on"]))
        if plan["child"]:
            changes.append(MovedProcesses(plan["child"], plan["home"], plan["placed"]))
        return changes

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        if facts["how"] == "duty":
            return self._evidence_duty(facts, changes, grip)
        plan = facts["plan"]
        inside = members_below(plan["group"])
        outside = [entry["pid"] for entry in _identified(facts) if entry["pid"] not in inside]
        if outside:
            raise NoEffect(f"processes {outside} are not in {plan['group']}, where CPU time is capped")
        used = wall = 0.0
        throttled = 0
        # One period's quota may be carried into a short window, the clock ticks are coarse, and a tick that comes late
        # lets a period overrun, for which the scheduler holds back the next ones: over the cap means a longer look.
        for _ in range(5):
            told = _measure(facts, lambda: _throttled(plan["group"]))
            used, wall, throttled = used + told[0], wall + told[1], throttled + told[2]
            share = 100 * used / wall
            if share <= 1.25 * self.percent + 5:
                break
        else:
            raise NoEffect(f"the processes still use {share:.0f} % of one CPU, with a cap of {self.percent:g} %")
        return {
            "how": "cgroup",
            "cap_percent": self.percent,
            "used_percent": round(share, 1),
            "throttled_periods": throttled,
            "exercised": throttled > 0,
        }

    def _evidence_duty(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        if not all(change.holds(grip) for change in changes):
            raise NoEffect("the helper that stops and continues the processes has ended")
        looks = stopped = 0

        def look() -> int:
            nonlocal looks, stopped
            states = [state_of(entry["pid"]) for entry in _identified(facts)]
            looks += len([state for state in states if state != "D"])
            stopped += states.count("t")
            return 0

        used, wall, _ = _measure(facts, look, looks=150)
        share = 100 * stopped / max(1, looks)
        if share < (100 - self.percent) / 2 - 5:
            raise NoEffect(f"the processes stand still {share:.0f} % of the time, where {self.percent:g} % was granted")
        return {
            "how": "duty",
            "granted_percent": self.percent,
            "stopped_percent": round(share, 1),
            "used_percent": round(100 * used / wall, 1),
            "exercised": used > 0,
        }

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        if facts["how"] == "duty":
            held = [entry["pid"] for entry in _identified(facts) if state_of(entry["pid"]) == "t"]
            return {"still_stopped": held}
        plan = facts["plan"]
        found = {
            str(entry["pid"]): directory_of(entry["pid"], "cpu", Hierarchy(*plan["where"]))
            for entry in _identified(facts)
        }
        return {"cgroups": found, "limit": read_file(plan["file"]) or "gone"}


def _measure(facts: Dict[str, Any], counter: Callable[[], int], looks: int = 1) -> Tuple[float, float, int]:
    """CPU seconds the chosen processes use in a while, its length, and how far a counter went meanwhile.

    The counter is read ``looks`` times on the way.
    """
    time.sleep(PERIOD_US / 1e6)  # into a period that began under the cap
    before = {entry["pid"]: cpu_seconds(entry["pid"]) for entry in _identified(facts)}
    counted, begun = counter(), time.monotonic()
    for _ in range(looks):
        time.sleep(3 * LOOK_SECONDS / looks)
        counter()
    wall, moved = time.monotonic() - begun, counter() - counted
    used = sum((cpu_seconds(pid) or start or 0.0) - (start or 0.0) for pid, start in before.items())
    return used, wall, moved


def _throttled(group: str) -> int:
    """Periods in which a cgroup ran out of quota (nr_throttled in cpu.stat)."""
    words = (read_file(f"{group}/cpu.stat") or "").split()
    return int(words[words.index("nr_throttled") + 1]) if "nr_throttled" in words else 0


def _cap_plan(survey: Survey, chosen: List[Process], percent: float) -> Union[str, Dict[str, Any]]:
    """How to cap these processes by the CPU controller: what to make and write, or why it cannot be done."""
    where = hierarchy("cpu")
    if where is None:
        return "no cgroup hierarchy has the cpu controller"
    groups = {directory_of(process.pid, "cpu", where) for process in chosen} - {""}
    if not groups:
        return "the processes have ended"
    plan: Dict[str, Any] = {"where": list(where), "enable_in": "", "relies_on": [], "inode": 0, "child": ""}
    quota = max(1000, int(PERIOD_US * percent / 100))
    together = os.path.commonpath(groups)
    if where.version == 2 and together != where.root and set(members_below(together)) == {p.pid for p in chosen}:
        return _cap_whole(plan, together, quota, where)
    if len(groups) != 1:
        return "the processes are in different cgroups, with others"
    name = f"chaosgpu-{survey.injection}"
    plan["home"] = together
    plan["placed"] = {str(process.pid): [process.start, together] for process in chosen}
    if where.version == 1:
        child = f"{together}/{name}"
        if not os.path.exists(f"{together}/cpu.cfs_quota_us"):
            return f"{together} has no cpu.cfs_quota_us: the kernel lacks CPU bandwidth control"
        tightest = int(read_file(f"{together}/cpu.cfs_quota_us") or -1)
        period = int(read_file(f"{together}/cpu.cfs_period_us") or PERIOD_US)
        if 0 < tightest / period < quota / PERIOD_US:
            return f"{together} has a tighter CPU limit already ({tightest} of {period} us)"
        limit = {"file": f"{child}/cpu.cfs_quota_us", "old_limit": "-1", "limit": str(quota)}
        return {**plan, **limit, "group": child, "child": child}
    for limited in ("cpu.max", "memory.max"):
        if not _unlimited(f"{together}/{limited}"):
            return f"only some processes of {together} are chosen, and its {limited} would not hold for them meanwhile"
    parent = together if together == where.root else os.path.dirname(together)
    enable_in = _controller_off_in(parent, where)
    if enable_in is None:
        return f"the cpu controller cannot be switched on for the children of {parent}"
    child = f"{parent}/{name}"
    limit = {"file": f"{child}/cpu.max", "old_limit": f"max {PERIOD_US}", "limit": f"{quota} {PERIOD_US}"}
    relies_on = [controller_key(parent, "cpu")]
    return {**plan, **limit, "group": child, "child": child, "enable_in": enable_in, "relies_on": relies_on}


def _cap_whole(plan: Dict[str, Any], group: str, quota: int, where: Hierarchy) -> Union[str, Dict[str, Any]]:
    """Cap a cgroup v2 that holds the chosen processes and no other, by its own cpu.max: nobody has to be moved."""
    parent, file = os.path.dirname(group), f"{group}/cpu.max"
    if not _unlimited(file):
        return f"{group} has a CPU limit already ({read_file(file)})"
    enable_in = "" if os.path.exists(file) else _controller_off_in(parent, where)
    if enable_in is None:
        return f"{group} has no cpu.max, and the cpu controller cannot be switched on for the children of {parent}"
    old = read_file(file) or f"max {PERIOD_US}"
    limit = {"file": file, "old_limit": old, "limit": f"{quota} {PERIOD_US}", "inode": inode_of(file)}
    return {**plan, **limit, "group": group, "enable_in": enable_in, "relies_on": [controller_key(parent, "cpu")]}


def _unlimited(file: str) -> bool:
    return (read_file(file) or "max").split()[0] == "max"


def _controller_off_in(parent: str, where: Hierarchy) -> Optional[str]:
    """Where the cpu controller must be switched on for a cgroup below ``parent``: "" nowhere, None impossible.

    It must be on for ``parent`` itself, and only the root may have processes of its own beside children that are
    controlled (cgroup-v2.rst, "No Internal Process Constraint").
    """
    if "cpu" in (read_file(f"{parent}/cgroup.subtree_control") or "").split():
        return ""
    available = "cpu" in (read_file(f"{parent}/cgroup.controllers") or "").split()
    return parent if available and (parent == where.root or not members(parent)) else None
