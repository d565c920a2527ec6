"""Where cgroup controllers live on this node, and in which directory a process is under one.

cgroup v2 where it carries the controller, else the v1 hierarchy of that controller (cgroups(7)).
"""

import os
from typing import List, NamedTuple, Optional

from chaosgpu.changes.file_value import read_file


class Hierarchy(NamedTuple):
    """The mounted hierarchy that carries a controller. ``version`` is 2 or 1, ``root`` its mount point."""

    version: int
    root: str


def hierarchy(controller: str) -> Optional[Hierarchy]:
    """The hierarchy of ``cpu``, ``io`` (``blkio`` in v1), ``cpuset``...; None where there is none."""
    legacy = {"io": "blkio"}.get(controller, controller)
    found_v1 = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(maxsplit=2)
            point = before.split()[4]
            if kind == "cgroup2" and controller in (read_file(f"{point}/cgroup.controllers") or "").split():
                return Hierarchy(2, point)
            if kind == "cgroup" and legacy in options.strip().split(","):
                found_v1 = Hierarchy(1, point)
    return found_v1


def directory_of(pid: int, controller: str, where: Hierarchy) -> str:
    """The cgroup directory of a process in a hierarchy; "" when it has ended."""
    legacy = {"io": "blkio"}.get(controller, controller)
    for line in (read_file(f"/proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0") if where.version == 2 else (legacy in controllers.split(",")):
            return os.path.normpath(f"{where.root}/{path}")
    return ""


def ancestors(directory: str, where: Hierarchy) -> List[str]:
    """The directories above a cgroup, nearest first, the root last."""
    above = []
    while directory != where.root and directory.startswith(where.root):
        directory = os.path.dirname(directory)
        above.append(directory)
    return above
