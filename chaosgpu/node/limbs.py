"""An injection's limbs: whoever holds its lock file open, and the barrier that no orphan of theirs crosses.

The lock is a flock on an inherited descriptor (flock(2)): hand, commands and helpers share one open file, so it is free
only when the last of them is gone. A killed keeper's ``tc`` may still be about to act; judging the node before it is
gone would be judging too early.
"""

import fcntl
import os
import signal
import time
from typing import List

BARRIER_SECONDS = 1.0


def open_lock(path: str) -> int:
    """The lock file's descriptor, inheritable on purpose: children become limbs by it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.set_inheritable(fd, True)
    return fd


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def holders(path: str) -> List[int]:
    """Pids, ours excepted, that have the lock file open, as /proc/pid/fd tells."""
    try:
        ours = os.stat(path)
    except FileNotFoundError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            for fd in os.scandir(f"/proc/{name}/fd"):
                # The link's text is cheap; stat only what looks like the lock, so that no hung mount is touched.
                if os.readlink(fd.path).endswith(os.path.basename(path)):
                    opened = os.stat(fd.path)
                    if (opened.st_dev, opened.st_ino) == (ours.st_dev, ours.st_ino):
                        found.append(int(name))
                        break
        except OSError:
            continue  # it ended, or it is not ours to look into
    return found


def barrier(path: str, fd: int) -> bool:
    """SIGKILL every limb and take the lock. False when one does not die in time (D state): undo anyway, as stuck."""
    give_up = time.monotonic() + BARRIER_SECONDS
    pause = 0.001
    while not try_lock(fd):
        for pid in holders(path):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > give_up:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True
