"""An injection's limbs: whoever holds its lock file open, and the barrier that no orphan of theirs crosses.

The lock is a flock on an inherited descriptor (flock(2)): hand, commands and helpers share one open file, so it is free
only when the last of them is gone. A killed keeper's ``tc`` may still be about to act; judging the node before it is
gone would be judging too early.
"""

import fcntl
import os
import signal
import time
from typing import List, Optional

BARRIER_SECONDS = 1.0


def open_lock(path: str) -> int:
    """The lock file's descriptor, inheritable on purpose: children become limbs by it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.set_inheritable(fd, True)
    return fd


def sign(fd: int) -> None:
    """A hand's first deed with the lock in hand: a session of its own, noted in the file to find limbs by."""
    os.setsid()
    try:
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError:
        pass  # a full filesystem: the barrier then searches everywhere


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def holders(path: str, session: Optional[int] = None) -> List[int]:
    """Pids, ours excepted, that have the lock file open, as /proc/pid/fd tells; of one session where it is named."""
    try:
        ours = os.stat(path)
    except FileNotFoundError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if (session is None or _session(name) == session) and _has_open(name, path, ours):
                found.append(int(name))
        except OSError:
            continue  # it ended, or it is not ours to look into
    return found


def _session(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[3])


def _has_open(pid: str, path: str, wanted: os.stat_result) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        # The link's text is cheap; stat only what looks like the lock, so that no hung mount is touched.
        if os.readlink(f"/proc/{pid}/fd/{fd}").endswith(os.path.basename(path)):
            opened = os.stat(f"/proc/{pid}/fd/{fd}")
            if (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def barrier(path: str, fd: int) -> bool:
    """SIGKILL every limb and take the lock. False when one does not die in time (D state): undo anyway, as stuck.

    The hand's own session is searched first: quick on a node with ten thousand processes. Who left it is found by the
    search of all.
    """
    give_up = time.monotonic() + BARRIER_SECONDS
    pause = 0.001
    signed = os.pread(fd, 20, 0).strip()
    session: Optional[int] = int(signed) if signed.isdigit() else None
    while not try_lock(fd):
        for pid in holders(path, session):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > give_up:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
        if pause > 0.01:
            session = None
    return True
