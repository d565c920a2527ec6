"""How fast a cgroup reads or writes a device, measured by direct I/O from inside it: bounded in time and in bytes."""

import mmap
import os
import select
import signal
import time
from typing import Any, Dict, Optional, Tuple

from chaosgpu.changes.grip import die_with_parent

SECONDS = 1.0
WAIT_SECONDS = 6.0
BLOCK = 4096
SPAN = 16 * 1024 * 1024


def rate(group: str, name: str, limit: int, facts: Dict[str, Any]) -> Optional[float]:
    """Read or write directly for a second from inside the cgroup; the rate, or None where there is nothing to probe on.

    A child of the hand does it: on an unnamed file of the filesystem, or, for reads, on the device itself. Behind the
    cgroup's own I/O its one block may wait for long, and cannot be interrupted then: 0 is the rate, it is left to its
    end, and it holds nothing of ours open, so that no undo waits for it.
    """
    told_read, told_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            _close_all_but(told_write)
            found = _measure(group, name, limit, facts)
            os.write(told_write, b"" if found is None else repr(found).encode())
        finally:
            os._exit(0)
    os.close(told_write)
    try:
        told, _, _ = select.select([told_read], [], [], WAIT_SECONDS)
        answer = os.read(told_read, 100) if told else b"0"
    finally:
        os.close(told_read)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0 if told else os.WNOHANG)
    return float(answer) if answer else None


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed them


def _measure(group: str, name: str, limit: int, facts: Dict[str, Any]) -> Optional[float]:
    writing, counts_bytes = name.startswith("write"), name.endswith("per_second")
    size = BLOCK
    if counts_bytes:
        size = max(BLOCK, min(1024 * 1024, int(limit * SECONDS / 20) // BLOCK * BLOCK))
    buffer = mmap.mmap(-1, size)  # aligned to pages, as O_DIRECT asks for
    try:
        fd, span = _probe_file(writing, buffer, facts)
        if fd is None:
            return None
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as procs:
            procs.write(str(os.getpid()))
        done, offset = 0, 0
        begun = time.monotonic()
        while True:
            moved = os.pwritev(fd, [buffer], offset) if writing else os.preadv(fd, [buffer], offset)
            if not moved:
                return None
            done += moved if counts_bytes else 1
            offset = 0 if offset + 2 * size > span else offset + size
            passed = time.monotonic() - begun
            if passed >= SECONDS or done > 2 * limit * SECONDS:
                return done / passed
    except OSError:
        return None


def _probe_file(writing: bool, buffer: mmap.mmap, facts: Dict[str, Any]) -> Tuple[Optional[int], int]:
    """A descriptor to probe on and how far; None where nothing may be read or written."""
    if not writing and facts["node"]:
        fd = os.open(facts["node"], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        return fd, os.lseek(fd, 0, os.SEEK_END)
    if "probe_directory" not in facts:
        return None, 0
    fd = os.open(facts["probe_directory"], os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    if writing:
        return fd, SPAN
    for offset in range(0, 4 * len(buffer), len(buffer)):  # what was never written is read without the device
        os.pwritev(fd, [buffer], offset)
    return fd, 4 * len(buffer)
