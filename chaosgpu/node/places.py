"""Where things are on a node: the state directory, the machine-wide lock and socket, the interpreter, the clocks."""

import os
import re
import stat
import time
from typing import List

from chaosgpu.changes.errors import ChaosgpuError

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_dir() -> str:
    """The directory of the machine's one keeper: its lock and its socket, whatever ``CHAOSGPU_STATE`` says.

    ``/run/chaosgpu`` for root; for anyone else their own runtime directory, since their faults can only be their own.
    """
    if os.geteuid() == 0:
        return "/run/chaosgpu"
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/chaosgpu-{os.geteuid()}", "chaosgpu")


def state_dir() -> str:
    """The ledger's directory: ``CHAOSGPU_STATE``, else the run directory, whose tmpfs dies with the kernel's state."""
    return os.path.abspath(os.environ.get("CHAOSGPU_STATE") or run_dir())


def private_dir(path: str) -> str:
    """Make a directory that only we can enter; refuse one that someone else owns or can write."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ChaosgpuError(f"{path} must be a directory that only uid {os.geteuid()} can write: check who made it")
    return path


def socket_path() -> str:
    return os.path.join(run_dir(), "keeper.sock")


def lock_path() -> str:
    return os.path.join(run_dir(), "keeper.lock")


def known_states() -> List[str]:
    """Every state directory a keeper has used since boot, so that no ledger is forgotten when the variable changes."""
    try:
        with open(os.path.join(run_dir(), "states"), encoding="utf-8") as listed:
            return [line.rstrip("\n") for line in listed if line.endswith("\n")]
    except FileNotFoundError:
        return []


def remember_state(path: str) -> None:
    if path not in known_states():
        with open(os.path.join(run_dir(), "states"), "a", encoding="utf-8") as listed:
            listed.write(path + "\n")


def system_python() -> str:
    """A Python >= 3.9 that outlives the caller's environment: ``CHAOSGPU_PYTHON``, else the system's."""
    named = os.environ.get("CHAOSGPU_PYTHON")
    for candidate in [named] if named else ["/usr/bin/python3", "/usr/local/bin/python3"]:
        version = re.search(r"python3\.(\d+)", os.path.realpath(candidate))
        if os.access(candidate, os.X_OK) and (named or (version and int(version.group(1)) >= 9)):
            return candidate
    raise ChaosgpuError(
        f"no system Python 3.9 or newer was found on {os.uname().nodename}"
        f" ({named or '/usr/bin/python3'}): install python3, or name one in CHAOSGPU_PYTHON"
    )


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def boottime() -> float:
    """Seconds since boot, suspended time included (clock_gettime(2), CLOCK_BOOTTIME): no one can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ancestors(pid: int) -> List[int]:
    """A process and its ancestors up to, and without, pid 1."""
    line: List[int] = []
    while pid > 1 and pid not in line:
        line.append(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat_file:
                pid = int(stat_file.read().rpartition(b")")[2].split()[1])
        except OSError:
            break
    return line


def in_memory(path: str) -> bool:
    """Whether a path lies on a filesystem that a reboot empties (proc(5), mountinfo)."""
    path = os.path.realpath(path)
    best, kind = "", ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields, _, after = line.partition(" - ")
            point = fields.split()[4].replace("\\040", " ")
            if len(point) >= len(best) and (path + "/").startswith(point.rstrip("/") + "/"):
                best, kind = point, after.split()[0]
    return kind in ("tmpfs", "ramfs", "rootfs")
