"""Follows keeper, standby, hands and commands by ptrace, counts their state-changing system calls, kills at the Nth.

All processes share one count, so N = 1, 2, 3, ... walks through the whole life of an injection, whoever makes the call.
The victim is stopped at the entry of the call: it has not happened when the kill comes.
"""

import ctypes
import json
import os
import signal
import struct
import sys
from pathlib import Path

SEIZE, INTERRUPT, SYSCALL, CONT, DETACH, SETOPTIONS, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 7, 17, 0x4200, 0x420E
SYSGOOD, FORK, VFORK, CLONE, EXEC = 1, 2, 4, 8, 16
OPTIONS = SYSGOOD | FORK | VFORK | CLONE | EXEC
WALL = 0x40000000
TCGETS = 0x5401
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
    return number in CALLS


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
    """Seizes the family, then ``run`` until the Nth call has been answered with kills, or everything is detached."""

    def __init__(self, keeper, standby, limbs, number, mode):
        self.keeper, self.standby = keeper, standby
        self.number, self.mode = number, mode
        self.count = 0
        self.struck = None
        self.held = set()
        for pid in (keeper, standby, *limbs):
            if pid and not ptrace(SEIZE, pid, None, ctypes.c_void_p(OPTIONS)):
                self.held.add(pid)
                ptrace(INTERRUPT, pid)

    def run(self):
        while self.held:
            try:
                pid, status = os.waitpid(-1, WALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                self.held.discard(pid)
                continue
            self.held.add(pid)
            self._stopped(pid, status)
            if self.struck:
                return

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
        # Mode b kills the keeper while somebody else stands at a call; its own calls are mode a's.
        return not (self.mode == "b" and pid in (self.keeper, self.standby))

    def _strike(self, pid, call):
        role = role_of(pid, self.keeper, self.standby)
        family = {"a": [pid], "b": [self.keeper], "c": [*self.held - {self.standby}], "d": [*self.held]}[self.mode]
        self.struck = {"call": call, "role": role, "killed": len(family)}
        for victim in family:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass


def main():
    """``killer.py KEEPER STANDBY NUMBER MODE [LIMB ...]``: says ``ready``, then one JSON line when it has struck."""
    keeper, standby, number = map(int, sys.argv[1:4])
    killer = Killer(keeper, standby, [int(pid) for pid in sys.argv[5:]], number, sys.argv[4])
    signal.signal(signal.SIGTERM, lambda *_: finish(killer))
    print("ready", flush=True)
    killer.run()
    finish(killer)


def finish(killer):
    """Leave: the kernel lets go of everyone who is still held (ptrace(2))."""
    print(json.dumps({"count": killer.count, "struck": killer.struck}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
