"""Follows keeper, standby, hands and commands by ptrace, counts their state-changing system calls, kills at the Nth.

All processes share one count, so N = 1, 2, 3, ... walks through the whole life of an injection, whoever makes the call.
The victim is stopped at the entry of the call: it has not happened when the kill comes.
"""

import ctypes
import json
import os
import signal
import struct
import time
from pathlib import Path

SEIZE, INTERRUPT, SYSCALL, CONT, DETACH, SETOPTIONS, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 7, 17, 0x4200, 0x420E
SYSGOOD, FORK, VFORK, CLONE, EXEC = 1, 2, 4, 8, 16
OPTIONS = SYSGOOD | FORK | VFORK | CLONE | EXEC
WALL = 0x40000000
TCGETS = 0x5401
PR_CAPBSET_READ = 23
O_CREAT_TMPFILE_TRUNC = 0o100 | 0o20000000 | 0o1000

# x86_64 numbers (arch/x86/entry/syscalls/syscall_64.tbl)
CALLS = {
    1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 44: "sendto", 46: "sendmsg", 16: "ioctl",
    56: "clone", 57: "fork", 58: "vfork", 435: "clone3", 59: "execve", 231: "exit_group", 62: "kill", 234: "tgkill",
    424: "pidfd_send_signal", 101: "ptrace", 203: "sched_setaffinity", 285: "fallocate", 77: "ftruncate",
    76: "truncate",
    74: "fsync", 75: "fdatasync", 83: "mkdir", 258: "mkdirat", 84: "rmdir", 87: "unlink", 263: "unlinkat", 82: "rename",
    264: "renameat", 316: "renameat2", 165: "mount", 166: "umount2", 272: "unshare", 308: "setns", 73: "flock",
    112: "setsid", 157: "prctl", 257: "openat", 85: "creat",
}  # fmt: skip

COMMANDS = (b"ip", b"tc", b"nft")

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request, pid, address=None, data=None):
    if libc.ptrace(request, pid, address, data) != 0 and request != GET_SYSCALL_INFO:
        return ctypes.get_errno()
    return 0


def entering(pid):
    """(number, arguments) of the system call that a thread is entering, or None when it is leaving one."""
    buffer = ctypes.create_string_buffer(88)
    if libc.ptrace(GET_SYSCALL_INFO, pid, ctypes.c_void_p(88), buffer) <= 0 or buffer.raw[0] != 1:
        return None
    number, *arguments = struct.unpack_from("<7Q", buffer.raw, 24)
    return number, arguments


def changes_state(number, arguments):
    if number == 257:
        return bool(arguments[2] & O_CREAT_TMPFILE_TRUNC)
    if number == 16 and arguments[1] == TCGETS:
        return False  # how Python asks whether a file is a terminal
    if number == 157 and arguments[0] == PR_CAPBSET_READ:
        return False
    return number in CALLS


def is_command(pid):
    """Whether this is a hand's command that changes something: those of iproute2 that only ask are asked for JSON."""
    try:
        name, *words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.path.basename(name) in COMMANDS and b"-j" not in words


def role_of(pid, keeper, standby):
    if pid == keeper:
        return "keeper"
    if pid == standby:
        return "standby"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return "hand" if b"keeper" in command else Path(command[0].decode()).name or "hand"


class Killer:
    """Seizes the family, then ``run`` until the Nth call has been answered with kills, or everything is detached.

    Mode ``r`` strikes twice: the keeper and all limbs at once, then everybody at the Nth call of the recovery.
    """

    def __init__(self, keeper, standby, limbs, number, mode, hold_seconds, tell):
        self.keeper, self.standby = keeper, standby
        self.number, self.mode, self.hold_seconds = number, mode, hold_seconds
        self.tell = tell
        self.count = 0
        self.struck = False
        self.held = set()
        for pid in (keeper, standby, *limbs):
            if pid and not ptrace(SEIZE, pid, None, ctypes.c_void_p(OPTIONS)):
                self.held.add(pid)
                ptrace(INTERRUPT, pid)
        if mode == "r":
            kill(keeper, *limbs)

    def run(self):
        while self.held and not self.struck:
            try:
                pid, status = os.waitpid(-1, WALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                self.held.discard(pid)
                continue
            self.held.add(pid)
            self._stopped(pid, status)

    def _stopped(self, pid, status):
        caught, event = os.WSTOPSIG(status), status >> 16
        deliver = 0
        if caught == signal.SIGTRAP | 0x80:
            call = entering(pid)
            if call and changes_state(*call) and self._counts(pid):
                self.count += 1
                if self.count == self.number:
                    self._strike(pid, CALLS[call[0]])
                    return
        elif event == 0:
            deliver = caught
        ptrace(SYSCALL, pid, None, ctypes.c_void_p(deliver))

    def _counts(self, pid):
        if self.mode == "b":  # the keeper dies while somebody else stands at a call; its own calls are mode a's
            return pid not in (self.keeper, self.standby)
        if self.mode == "e":
            return is_command(pid)
        return True

    def _strike(self, pid, call):
        role = role_of(pid, self.keeper, self.standby)
        family = {
            "a": [pid],
            "b": [self.keeper],
            "c": [*self.held - {self.standby}],
            "d": [*self.held],
            "e": [self.keeper, *self.held - {self.standby, pid}],
            "r": [*self.held],
            "p": [],
        }[self.mode]
        self.struck = True
        self.tell({"call": call, "role": role, "killed": len(family)})  # before anyone can notice
        if self.mode == "p":
            Path("/proc/sysrq-trigger").write_text("b")  # the machine is reset at once, nothing is synced
        kill(*family)
        if self.mode in "be":
            self._hold(pid)

    def _hold(self, pid):
        """Keep one process at its call while everybody else goes on: it is freed late, unless somebody ends it."""
        give_up = time.monotonic() + self.hold_seconds
        while time.monotonic() < give_up:
            ended = waited = 0
            try:
                waited, status = os.waitpid(-1, WALL | os.WNOHANG)
                ended = waited and not os.WIFSTOPPED(status)
            except ChildProcessError:
                return
            if waited and not ended and waited != pid:
                deliver = os.WSTOPSIG(status) if status >> 16 == 0 and os.WSTOPSIG(status) < 0x80 else 0
                ptrace(DETACH, waited, None, ctypes.c_void_p(deliver))
            elif ended and waited == pid:
                return
            elif not waited:
                time.sleep(0.001)


def kill(*family):
    for victim in family:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass


def descendants(pid):
    """All processes below one, as their parents stand now."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parents.setdefault(parent_of(int(name)), []).append(int(name))
    found, level = [], [pid]
    while level:
        level = [child for parent in level for child in parents.get(parent, [])]
        found += level
    return found


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Started:
    """A killer in a process of its own. ``fileno`` is readable as soon as it strikes; ``told`` ends it."""

    def __init__(self, keeper, standby, number, mode, hold_seconds, limbs=()):
        self._told, write = os.pipe()
        ready, say_ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._told)
                tell = lambda struck: os.write(write, json.dumps(struck).encode())  # noqa: E731
                killer = Killer(keeper, standby, limbs, number, mode, hold_seconds, tell)
                signal.signal(signal.SIGTERM, lambda *_: killer.struck or os._exit(0))
                os.write(say_ready, b"1")
                killer.run()
            finally:
                os._exit(0)  # the kernel lets go of everyone who is still held (ptrace(2))
        os.close(write)
        os.close(say_ready)
        ready_said = os.read(ready, 1)
        os.close(ready)
        if not ready_said:
            raise RuntimeError("the killer could not start")

    def fileno(self):
        return self._told

    def told(self):
        """What was struck, or None when it never came to the Nth call. Waits until all are let go."""
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        with os.fdopen(self._told) as pipe:
            text = pipe.read()
        os.waitpid(self.pid, 0)
        return json.loads(text) if text else None
