"""The value of a kernel file: sysfs, procfs, a cgroup's limit."""

import os
import shlex
from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional

from chaosgpu.changes.base import Described, Value
from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.grip import Grip


def read_file(path: str) -> Optional[str]:
    """A kernel file's text without its line end; None when it is gone."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (19, 3):  # ENODEV: its cgroup was removed while open; ESRCH: its process ended
            return None
        raise ChangeFailed(f"{path} cannot be read: {error.strerror}") from None


def write_file(path: str, value: str) -> None:
    """Write in one write(2), as kernel files want it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise ChangeFailed(f"{path} does not take {value!r}: {error.strerror}") from None


@dataclass(frozen=True)
class FileValue(Value):
    """``old`` becomes ``wanted`` in the kernel file at ``path``; words are compared, not spacing.

    ``inode`` names the file (st_ino, see ``inode_of``): a cgroup made anew under the same path is another one; 0 where
    the path itself carries the injection's id. ``key`` is the conflict key of the object that the file belongs to,
    ``relies_on`` are the keys without which the file would go.
    """

    kind: ClassVar[str] = "file.value"

    path: str
    old: str
    wanted: str
    inode: int
    key: str
    relies_on: List[str] = field(default_factory=list)

    def keys(self) -> List[str]:
        return [self.key]

    def needs(self) -> List[str]:
        return self.relies_on

    def name(self) -> str:
        return self.path

    def identity_lost(self) -> str:
        found = inode_of(self.path)
        return "" if 0 in (found, self.inode) or found == self.inode else "it is another file by now"

    def read(self, grip: Grip) -> Optional[str]:
        return read_file(self.path)

    def write(self, value: Any, grip: Grip) -> None:
        write_file(self.path, value)

    def old_value(self) -> str:
        return self.old

    def wanted_value(self) -> str:
        return self.wanted

    def same(self, one: Any, other: Any) -> bool:
        return (one or "").split() == (other or "").split()

    def describe(self) -> Described:
        path = shlex.quote(self.path)
        return Described(f"echo {shlex.quote(self.wanted)} > {path}", f"echo {shlex.quote(self.old)} > {path}")


def inode_of(path: str) -> int:
    """The file's inode number; 0 when it is gone."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
