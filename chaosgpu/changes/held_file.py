"""Blocks of a filesystem held by an unnamed file: they return when its holder ends, whatever ended it."""

import ctypes
import errno
import os
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple

from chaosgpu.changes.base import ALREADY, FD, REMOVED, Change, Described, Undone
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip

_libc = ctypes.CDLL(None, use_errno=True)
_CHUNK = 256 * 1024 * 1024
_SMALLEST = 64 * 1024


def _allocate(fd: int, offset: int, length: int) -> None:
    """fallocate(2). Not posix_fallocate(3), which writes a byte to each block where the filesystem cannot allocate."""
    if _libc.fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class HeldFile(Change):
    """``size_bytes`` allocated (fallocate(2)) in an O_TMPFILE file (open(2)) of ``directory``, held by the hand.

    ``filesystem`` is the st_dev, MAJ:MIN, that the directory had when it was surveyed.
    """

    kind: ClassVar[str] = "file.held"
    bound: ClassVar[str] = FD

    directory: str
    filesystem: str
    size_bytes: int

    def keys(self) -> List[str]:
        return [f"filesystem:{self.filesystem}"]

    def name(self) -> str:
        return f"free space of the filesystem at {self.directory}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "0 bytes held", f"{self.size_bytes} bytes held"

    def _key(self) -> str:
        return f"held-{self.filesystem}"

    def apply(self, grip: Grip) -> Any:
        try:
            fd = os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ChangeFailed(f"{self.directory} takes no unnamed file (O_TMPFILE): {error.strerror}") from None
        found = os.fstat(fd).st_dev
        if f"{os.major(found)}:{os.minor(found)}" != self.filesystem:
            os.close(fd)
            raise Moved(f"{self.directory} is on another filesystem than when it was surveyed")
        grip.keep(self._key(), fd)
        held, step = 0, _CHUNK
        while held < self.size_bytes and step >= _SMALLEST:
            step = min(step, self.size_bytes - held)
            try:
                _allocate(fd, held, step)
                held += step
                step = _CHUNK if step >= _SMALLEST else step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise ChangeFailed(f"{self.directory} cannot be filled by fallocate: {error.strerror}") from None
                step //= 2  # the rest is less than that: take what there is
        return {"bytes": held}

    def holds(self, grip: Grip) -> bool:
        return grip.kept(self._key()) is not None

    def undo(self, observed: Any, grip: Grip) -> Undone:
        fd = grip.let_go(self._key())
        if fd is None:
            return Undone(ALREADY, "the blocks returned when their holder ended")
        os.close(fd)
        return Undone(REMOVED)

    def describe(self) -> Described:
        file = shlex.quote(os.path.join(self.directory, "filler"))
        return Described(
            f"fallocate -l {self.size_bytes} {file}", f"rm {file}  # ours has no name: it ends with the hand"
        )
