"""A child cgroup for each rank, in each hierarchy a fault may use: v2 alone, or v1 blkio, cpu and freezer too."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaosgpu.lab.errors import LabError
from chaosgpu.lab.place import Place, Record

RANKS = (0, 1)
V1_CONTROLLERS = {"blkio", "cpu", "freezer"}
V2_CONTROLLERS = ["cpu", "io"]
EMPTY_LIMIT_SECONDS = 5


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup tree."""

    mount: Path
    controllers: frozenset[str]  # of those the lab uses; none for the v2 tree of a hybrid host
    v2: bool


def hierarchies() -> list[Hierarchy]:
    """The trees in which ranks get a group.

    :raises LabError: nothing on this machine can throttle a group's block I/O.
    """
    trees: dict[tuple[bool, frozenset[str]], Hierarchy] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount = Path(before.split(" ")[4])
        if not (mount / "cgroup.procs").exists():
            continue  # another kind of file system, or a tree that a later mount hides
        if kind == "cgroup":
            wanted = V1_CONTROLLERS & set(options.split(","))
            if not wanted:
                continue
        elif kind == "cgroup2":
            wanted = set(V2_CONTROLLERS) & set((mount / "cgroup.controllers").read_text(encoding="ascii").split())
        else:
            continue
        trees.setdefault((kind == "cgroup2", frozenset(wanted)), Hierarchy(mount, frozenset(wanted), kind == "cgroup2"))
    if not any({"io", "blkio"} & tree.controllers for tree in trees.values()):
        raise LabError("cgroups: neither io (v2) nor blkio (v1) is mounted, so no storage fault can be rehearsed here")
    return sorted(trees.values(), key=lambda tree: tree.mount)


class Groups:
    """The lab's cgroups: ``<tree>/<lab>/rank0`` and ``rank1``."""

    name = "cgroups"

    def __init__(self, place: Place, record: Record) -> None:
        self._place = place
        self._record = record

    def of(self, rank: int) -> list[Path]:
        """A rank's directories, one in each tree."""
        return [Path(group) for group in self._record.groups if Path(group).name == f"rank{rank}"]

    def relative(self, rank: int) -> str:
        """A rank's group as /proc/PID/cgroup names it, the same in each tree."""
        return f"/{self._place.name}/rank{rank}"

    def healthy(self) -> bool:
        """Whether every group is there."""
        return bool(self._record.groups) and all(Path(group).is_dir() for group in self._record.groups)

    def ensure(self) -> bool:
        """Make what is missing; True when something was."""
        if self.healthy():
            return False
        trees = hierarchies()
        self._record.groups = []
        for tree in trees:
            top = tree.mount / self._place.name
            self._record.groups += [str(top), *(str(top / f"rank{rank}") for rank in RANKS)]
            if tree.v2 and (off := sorted(tree.controllers - _switched_on(tree.mount))):
                self._record.controllers[str(tree.mount)] = off
        self._place.save(self._record)
        try:
            for tree in trees:
                if tree.v2:
                    _switch(tree.mount, "+", sorted(tree.controllers - _switched_on(tree.mount)))
                top = tree.mount / self._place.name
                top.mkdir(exist_ok=True)
                if tree.v2:
                    _switch(top, "+", sorted(tree.controllers))
                for rank in RANKS:
                    (top / f"rank{rank}").mkdir(exist_ok=True)
        except OSError as error:
            raise LabError(
                f"cgroups: {error.filename}: {error.strerror}; in a container, run it privileged and with the host's "
                "cgroup namespace"
            ) from error
        return True

    def remove(self) -> bool:
        """Remove every group, also those that something made inside; True when there was one."""
        tops = [Path(group) for group in self._record.groups if Path(group).name == self._place.name]
        there = [top for top in tops if top.is_dir()]
        for top in there:
            for directory, _, _ in os.walk(top, topdown=False):
                _remove(Path(directory))
        for mount, controllers in self._record.controllers.items():
            # EBUSY: a group that came later uses it. It is not ours to take away any more.
            with suppress(OSError):
                if not _used(Path(mount)):
                    _switch(Path(mount), "-", controllers)
        self._record.groups, self._record.controllers = [], {}
        return bool(there)


def _switched_on(group: Path) -> set[str]:
    return set((group / "cgroup.subtree_control").read_text(encoding="ascii").split())


def _switch(group: Path, sign: str, controllers: list[str]) -> None:
    if controllers:
        control = group / "cgroup.subtree_control"
        control.write_text(" ".join(sign + controller for controller in controllers), encoding="ascii")


def _used(mount: Path) -> bool:
    """Whether a group of someone else has a setting that would go with the controller."""
    return any(
        setting.read_text(encoding="ascii").strip() not in ("", "max 100000", "100", "default 100")
        for name in ("io.max", "io.weight", "cpu.max", "cpu.weight")
        for setting in mount.glob(f"*/{name}")
    )


def _remove(group: Path) -> None:
    deadline = time.monotonic() + EMPTY_LIMIT_SECONDS
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                pids = ", ".join((group / "cgroup.procs").read_text(encoding="ascii").split())
                raise LabError(
                    f"cgroups: {group} cannot be removed ({error.strerror}): it holds processes "
                    f"{pids or 'of another namespace'}; end them, then run down again"
                ) from error
            time.sleep(0.02)
