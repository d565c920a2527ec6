"""Limits of a cgroup on one block device: io.max (cgroup-v2.rst), blkio.throttle.* (cgroup-v1/blkio-controller.rst)."""

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional

from chaosgpu.changes.base import Described, Value
from chaosgpu.changes.cgroup import controller_key
from chaosgpu.changes.file_value import inode_of, read_file, write_file
from chaosgpu.changes.grip import Grip

KEYS = ("rbps", "wbps", "riops", "wiops")


def io_max(directory: str, device: str) -> Optional[Dict[str, int]]:
    """A device's limits in a cgroup v2 directory, without those that are ``max``; None when the file is gone."""
    text = read_file(f"{directory}/io.max")
    if text is None:
        return None
    for line in text.splitlines():
        found, *pairs = line.split()
        if found == device:
            split = (pair.split("=") for pair in pairs)
            return {key: int(value) for key, value in split if key in KEYS and value != "max"}
    return {}


@dataclass(frozen=True)
class IoMax(Value):
    """``limits`` (rbps, wbps, riops, wiops) for ``device`` (MAJ:MIN) in ``directory``, where there were none."""

    kind: ClassVar[str] = "cgroup.io_max"

    directory: str
    device: str
    inode: int  # of io.max, 0 when the file appears only with the fault
    limits: Dict[str, int] = field(default_factory=dict)

    def keys(self) -> List[str]:
        return [f"cgroup:{self.directory}"]

    def needs(self) -> List[str]:
        return [controller_key(os.path.dirname(self.directory), "io")]

    def name(self) -> str:
        return f"{self.directory}/io.max of device {self.device}"

    def identity_lost(self) -> str:
        found = inode_of(f"{self.directory}/io.max")
        return "" if 0 in (found, self.inode) or found == self.inode else "it is another cgroup by now"

    def read(self, grip: Grip) -> Optional[Dict[str, int]]:
        return io_max(self.directory, self.device)

    def write(self, value: Any, grip: Grip) -> None:
        write_file(f"{self.directory}/io.max", self._line(value))

    def _line(self, value: Dict[str, int]) -> str:
        return " ".join([self.device, *(f"{key}={value.get(key, 'max')}" for key in KEYS)])

    def old_value(self) -> Dict[str, int]:
        return {}

    def wanted_value(self) -> Dict[str, int]:
        return self.limits

    def describe(self) -> Described:
        path = shlex.quote(f"{self.directory}/io.max")
        return Described(f"echo '{self._line(self.limits)}' > {path}", f"echo '{self._line({})}' > {path}")


def throttle(file: str, device: str) -> Optional[int]:
    """A device's limit in a blkio.throttle file, 0 when there is none; None when the file is gone."""
    text = read_file(file)
    if text is None:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [device]), 0)


@dataclass(frozen=True)
class BlkioThrottle(Value):
    """One limit of cgroup v1: ``limit`` for ``device`` in ``file`` (blkio.throttle.write_bps_device), none before."""

    kind: ClassVar[str] = "cgroup.blkio"

    file: str
    device: str
    inode: int
    limit: int

    def keys(self) -> List[str]:
        return [f"cgroup:{self.file.rpartition('/')[0]}"]

    def name(self) -> str:
        return f"{self.file} of device {self.device}"

    def identity_lost(self) -> str:
        found = inode_of(self.file)
        return "" if found in (0, self.inode) else "it is another cgroup by now"

    def read(self, grip: Grip) -> Optional[int]:
        return throttle(self.file, self.device)

    def write(self, value: Any, grip: Grip) -> None:
        write_file(self.file, f"{self.device} {value}")

    def old_value(self) -> int:
        return 0

    def wanted_value(self) -> int:
        return self.limit

    def describe(self) -> Described:
        path = shlex.quote(self.file)
        return Described(f"echo '{self.device} {self.limit}' > {path}", f"echo '{self.device} 0' > {path}")
