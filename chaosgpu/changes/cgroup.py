"""Control groups: one made for a fault, processes moved into it, a controller switched on for its children.

Semantics: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst.
"""

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Tuple

from chaosgpu.changes.base import (
    ALREADY,
    LOST,
    RESTORED,
    SUPERSEDED,
    Change,
    Created,
    Described,
    Undone,
    Value,
    start_time_ticks,
)
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.file_value import read_file, write_file
from chaosgpu.changes.grip import Grip

_ROUNDS = 50


def members(path: str) -> List[int]:
    """The processes of one cgroup directory; [] when it is gone."""
    return [int(pid) for pid in (read_file(f"{path}/cgroup.procs") or "").split()]


def members_below(path: str) -> List[int]:
    """The processes of a cgroup and of all its descendants."""
    return [pid for directory, _, _ in os.walk(path) for pid in members(directory)]


@dataclass(frozen=True)
class ChildCgroup(Created):
    """A cgroup directory whose name carries the injection's id. What is made inside it meanwhile goes with it."""

    kind: ClassVar[str] = "cgroup.child"

    path: str

    def keys(self) -> List[str]:
        return [f"cgroup:{self.path}"]

    def name(self) -> str:
        return f"cgroup {self.path}"

    def present(self, grip: Grip) -> bool:
        return os.path.isdir(self.path)

    def create(self, grip: Grip) -> None:
        try:
            os.mkdir(self.path)
        except OSError as error:
            raise ChangeFailed(f"{self.name()} cannot be made: {error.strerror}") from None

    def remove(self, grip: Grip) -> None:
        for directory, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise ChangeFailed(
                    f"cgroup {directory} cannot be removed: {error.strerror}; inside: {members(directory)}"
                ) from None

    def describe(self) -> Described:
        return Described(f"mkdir {shlex.quote(self.path)}", f"rmdir {shlex.quote(self.path)}")


@dataclass(frozen=True)
class MovedProcesses(Change):
    """Processes moved into a cgroup of ours. The undo moves back whoever is in it, born inside or not.

    ``old`` maps a pid to [start time, the cgroup directory it was in]; ``home`` is where those born inside go.
    """

    kind: ClassVar[str] = "cgroup.moved"

    into: str
    home: str
    old: Dict[str, List[Any]] = field(default_factory=dict)

    def keys(self) -> List[str]:
        return [f"placement:{pid}/{start}" for pid, (start, _) in self.old.items()]

    def name(self) -> str:
        return f"cgroup of processes {', '.join(self.old)}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return ", ".join(sorted({directory for _, directory in self.old.values()})), self.into

    def apply(self, grip: Grip) -> Any:
        moved = []
        for pid, (start, _) in self.old.items():
            if start_time_ticks(int(pid)) == start and self._move(int(pid), self.into):
                moved.append(int(pid))
        if not moved:
            raise Moved(f"all processes to be moved into {self.into} have ended")
        return moved

    def _move(self, pid: int, path: str) -> bool:
        try:
            write_file(f"{path}/cgroup.procs", str(pid))
        except ChangeFailed:
            if start_time_ticks(pid) is None:
                return False
            raise
        return True

    def holds(self, grip: Grip) -> bool:
        return bool(members_below(self.into))

    def undo(self, observed: Any, grip: Grip) -> Undone:
        restored, lost = 0, []
        for _ in range(_ROUNDS):
            inside = members_below(self.into)
            if not inside:
                break
            for pid in inside:
                home = self._home(pid)
                if not os.path.isdir(home):
                    lost.append(pid)
                    home = os.path.dirname(self.into)
                restored += self._move(pid, home)
        if lost:
            return Undone(LOST, f"the cgroup of processes {lost} is gone: they are in {os.path.dirname(self.into)}")
        elsewhere = [pid for pid, (start, home) in self.old.items() if self._is_elsewhere(int(pid), start, home)]
        if elsewhere:
            return Undone(SUPERSEDED, f"processes {', '.join(elsewhere)} were moved by someone else, left alone")
        return Undone(RESTORED if restored else ALREADY)

    def _is_elsewhere(self, pid: int, start: int, home: str) -> bool:
        return start_time_ticks(pid) == start and pid not in members(home) and start_time_ticks(pid) == start

    def _home(self, pid: int) -> str:
        start, path = self.old.get(str(pid), (None, self.home))
        return str(path) if start is None or start_time_ticks(pid) == start else self.home

    def describe(self) -> Described:
        into = shlex.quote(f"{self.into}/cgroup.procs")
        home = shlex.quote(f"{self.home}/cgroup.procs")
        return Described(
            f"for p in {' '.join(self.old)}; do echo $p > {into}; done",
            f"for p in $(cat {into}); do echo $p > {home}; done",
        )


def controller_key(path: str, controller: str) -> str:
    """The conflict key of a controller being on for the children of a cgroup; a limit in a child needs it."""
    return f"subtree_control:{path}/{controller}"


@dataclass(frozen=True)
class ControllerEnabled(Value):
    """A controller in a cgroup v2 directory's ``cgroup.subtree_control``, absent before."""

    kind: ClassVar[str] = "cgroup.controller"

    path: str
    controller: str

    def keys(self) -> List[str]:
        return [controller_key(self.path, self.controller)]

    def name(self) -> str:
        return f"controller {self.controller} for the children of {self.path}"

    def read(self, grip: Grip) -> Optional[bool]:
        listed = read_file(f"{self.path}/cgroup.subtree_control")
        return None if listed is None else self.controller in listed.split()

    def write(self, value: Any, grip: Grip) -> None:
        write_file(f"{self.path}/cgroup.subtree_control", f"{'+' if value else '-'}{self.controller}")

    def old_value(self) -> bool:
        return False

    def wanted_value(self) -> bool:
        return True

    def undo(self, observed: Any, grip: Grip) -> Undone:
        relying = [child.path for child in _children(self.path) if _limits(child.path, self.controller)]
        if relying:
            return Undone(SUPERSEDED, f"{relying[0]} has a limit of controller {self.controller} now: it is left on")
        return super().undo(observed, grip)

    def describe(self) -> Described:
        path = shlex.quote(f"{self.path}/cgroup.subtree_control")
        return Described(f"echo +{self.controller} > {path}", f"echo -{self.controller} > {path}")


def _children(path: str) -> List["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []


def _limits(path: str, controller: str) -> bool:
    """Whether someone has set a limit that goes when the controller is switched off (cpu.max, io.max)."""
    limit = read_file(f"{path}/{controller}.max") or ""
    return bool(limit) and not limit.startswith("max")
