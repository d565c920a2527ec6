"""The machine's keeper lock: an fcntl record lock (fcntl(2)), never inherited, whose holder F_GETLK can name."""

import fcntl
import os
import struct

from chaosgpu.node import places


def hold_lock() -> bool:
    """Take the machine's keeper lock: an fcntl record lock, never inherited, whose holder F_GETLK can name."""
    fd = os.open(places.lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return False
    return True  # the descriptor stays open for the life of the process: closing it would free the lock


def lock_holder() -> int:
    """The pid that holds the keeper lock, as F_GETLK names it (fcntl(2)); 0 when it is free."""
    try:
        fd = os.open(places.lock_path(), os.O_RDONLY | os.O_CLOEXEC)  # also on a filesystem that became read-only
    except FileNotFoundError:
        return 0
    try:
        # struct flock on 64-bit Linux: short type, short whence, off_t start, off_t len, pid_t pid
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        told = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return 0 if told[0] == fcntl.F_UNLCK else int(told[4])
