"""The CPU affinity of all threads of a process (sched_setaffinity(2))."""

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, Iterator, List, Optional, Set, Tuple

from chaosgpu.changes.base import ALREADY, LOST, RESTORED, SUPERSEDED, Change, Described, Undone, start_time_ticks
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.helpers.tracer import threads

_ROUNDS = 50


def mask_of(tid: int) -> List[int]:
    """A thread's affinity mask as sorted CPU numbers; [] when it is gone."""
    try:
        return sorted(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return []


def cpu_list(cpus: List[int]) -> str:
    """CPU numbers in the kernel's list format, as taskset(1) takes it: ``0-3,8``."""
    parts: List[str] = []
    for cpu in sorted(cpus):
        if parts and int(parts[-1].rpartition("-")[2]) == cpu - 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{cpu}"
        else:
            parts.append(str(cpu))
    return ",".join(parts)


def descendants(pid: int, since_ticks: int) -> Iterator[int]:
    """Processes below ``pid`` born at or after an instant (clock ticks since boot)."""
    children: Dict[int, List[Tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append((int(name), int(fields[19])))
    seen: Set[int] = {pid}
    below = [pid]
    while below:
        for child, born in children.get(below.pop(), []):
            if child not in seen:
                seen.add(child)
                below.append(child)
                if born >= since_ticks:
                    yield child


@dataclass(frozen=True)
class ThreadAffinity(Change):
    """Every thread of process ``pid`` gets the CPUs ``wanted``.

    ``old`` has each surveyed thread's mask. Threads and children born meanwhile inherit the fault's mask; the undo
    finds them by that rule and gives them ``old_default``, what they would have inherited otherwise.
    """

    kind: ClassVar[str] = "cpu.affinity"

    pid: int
    start: int
    wanted: List[int]
    old_default: List[int]
    since_ticks: int
    old: Dict[str, List[int]] = field(default_factory=dict)

    def keys(self) -> List[str]:
        return [f"affinity:{self.pid}/{self.start}"]

    def name(self) -> str:
        return f"CPU affinity of process {self.pid}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return cpu_list(self.old_default), cpu_list(self.wanted)

    def apply(self, grip: Grip) -> Any:
        if start_time_ticks(self.pid) != self.start:
            raise Moved(f"process {self.pid} has ended")
        for tid in threads(self.pid):
            now = mask_of(tid)
            if now and now != self.old.get(str(tid), self.old_default):
                raise Moved(f"{self.name()}: thread {tid} was moved to CPUs {cpu_list(now)} after its survey")
        placed: Dict[int, List[int]] = {}
        for _ in range(_ROUNDS):
            fresh = [tid for tid in threads(self.pid) if tid not in placed]
            if not fresh:
                break
            for tid in fresh:
                self._set(tid, self.wanted)
                placed[tid] = mask_of(tid)
        if not any(placed.values()):
            raise Moved(f"process {self.pid} has ended")
        return next(mask for mask in placed.values() if mask)

    def _set(self, tid: int, cpus: List[int]) -> None:
        try:
            os.sched_setaffinity(tid, cpus)
        except ProcessLookupError:
            pass  # it ended: nothing to place
        except OSError as error:
            raise ChangeFailed(f"thread {tid} cannot run on CPUs {cpu_list(cpus)}: {error.strerror}") from None

    def _members(self) -> List[Tuple[int, List[int]]]:
        """Each thread that the fault may have placed, with the mask it shall have again."""
        found = [(tid, self.old.get(str(tid), self.old_default)) for tid in threads(self.pid)]
        for child in descendants(self.pid, self.since_ticks):
            found += [(tid, self.old_default) for tid in threads(child)]
        return found

    def holds(self, grip: Grip) -> bool:
        if start_time_ticks(self.pid) != self.start:
            return False
        return any(mask != self.wanted and mask_of(tid) == self.wanted for tid, mask in self._members())

    def undo(self, observed: Any, grip: Grip) -> Undone:
        if start_time_ticks(self.pid) != self.start:
            return Undone(LOST, f"process {self.pid} has ended")
        placed = sorted(observed or self.wanted)
        restored = 0
        foreign: List[int] = []
        for _ in range(_ROUNDS):
            astray = [(tid, old, mask_of(tid)) for tid, old in self._members()]
            ours = [(tid, old) for tid, old, now in astray if now != old and now == placed]
            foreign = [tid for tid, old, now in astray if now and now not in (old, placed)]
            for tid, old in ours:
                self._set(tid, old)
                restored += 1
            if not ours:
                break
        if foreign:
            named = ", ".join(map(str, foreign[:5]))
            return Undone(SUPERSEDED, f"threads {named} of process {self.pid} were moved by someone else, left alone")
        return Undone(RESTORED if restored else ALREADY)

    def describe(self) -> Described:
        return Described(
            f"taskset --all-tasks --cpu-list --pid {cpu_list(self.wanted)} {self.pid}",
            f"taskset --all-tasks --cpu-list --pid {cpu_list(self.old_default)} {self.pid}",
        )
