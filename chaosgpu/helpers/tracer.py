"""Holding the threads of a process in ptrace-stop (ptrace(2)), for the hand and for helpers.

PTRACE_SEIZE and PTRACE_INTERRUPT stop a thread without a signal that anyone sees, and the kernel lets it run again when
its tracer dies, whatever killed it.
"""

import ctypes
import errno
import os
import time
from typing import Dict, List, Optional

_PTRACE_DETACH = 17
_PTRACE_SEIZE = 0x4206
_PTRACE_INTERRUPT = 0x4207
_WALL = 0x40000000
_STOP_SECONDS = 2.0
_ROUNDS = 100
_ENDED = ("Z", "X", "")  # a first thread that has ended stays visible while others live (pthread_exit(3))
_CAP_SYS_PTRACE = 19
_NO_PID = 2**22 + 1  # above the kernel's largest pid (PID_MAX_LIMIT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class CannotTrace(Exception):
    """A thread that the kernel does not let us trace, with the reason in one line."""


def threads(pid: int) -> List[int]:
    """The thread ids of a process, [] when it is gone."""
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return []


def _ptrace(request: int, tid: int, data: int = 0) -> int:
    """0, or the errno of the failure."""
    return 0 if _libc.ptrace(request, tid, None, data) == 0 else ctypes.get_errno()


def state_of(pid: int) -> str:
    """The one-letter state of /proc/pid/stat (R, S, D, T, t, Z...); "" when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def start_time_ticks(pid: int) -> Optional[int]:
    """A process's start time in clock ticks since boot (proc(5), /proc/pid/stat field 22); None when it is gone.

    Together with the pid this names one process for the life of the machine: pids are reused, the pair is not.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            after_name = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if after_name[0] == b"X" or (after_name[0] == b"Z" and len(threads(pid)) < 2):
        return None  # with more threads it is only the first that has ended (pthread_exit(3))
    return int(after_name[19])


def why_not_trace() -> str:
    """Why this process may trace nobody: Yama, a missing capability, a seccomp filter; "" when it may."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as scope:
            if scope.read().strip() == "3":
                return "kernel.yama.ptrace_scope is 3"
    except FileNotFoundError:
        pass
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    if not effective >> _CAP_SYS_PTRACE & 1:
        return "CAP_SYS_PTRACE is missing"
    refused = _ptrace(_PTRACE_SEIZE, _NO_PID)
    return "" if refused == errno.ESRCH else f"ptrace is not permitted here ({os.strerror(refused)})"


def tracer_of(pid: int) -> int:
    """The pid that traces a process (TracerPid of /proc/pid/status), 0 when nobody does."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            return next((int(line.split()[1]) for line in status if line.startswith("TracerPid:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Tracer:
    """Holds all threads of one process in ptrace-stop. Only the thread that made it may use it (ptrace(2)).

    The process is ``pid`` as it was born at ``start`` (``start_time_ticks``); one that got its number later is let be.
    """

    def __init__(self, pid: int, start: Optional[int]) -> None:
        self.pid = pid
        self.start = start
        self._signals: Dict[int, int] = {}  # stopped threads, with the signal to deliver when they go on
        self._stopping: Dict[int, bool] = {}  # interrupted, not seen to stop yet (a thread in D state stops later)

    def stop(self) -> int:
        """Seize and interrupt every thread until no new one turns up; how many are held. Raises CannotTrace."""
        refused: Dict[int, str] = {}
        for _ in range(_ROUNDS):
            fresh = [
                tid
                for tid in threads(self.pid)
                if tid not in self._signals
                and tid not in self._stopping
                and state_of_thread(self.pid, tid) not in _ENDED
            ]
            if not fresh or start_time_ticks(self.pid) != self.start:
                break
            for tid in fresh:
                why = self._seize(tid)
                if why and why == refused.get(tid):
                    raise CannotTrace(f"thread {tid} of process {self.pid} cannot be traced: {why}")
                # Refused once, it may just have ended, or been replaced by an execve(2) that took its number.
                refused[tid] = why
            self._wait()
        if start_time_ticks(self.pid) != self.start:
            self.close()
            return 0
        return len(self._signals) + len(self._stopping)

    def _seize(self, tid: int) -> str:
        """Why the kernel refused it; "" when it did not, or the thread has ended."""
        failed = _ptrace(_PTRACE_SEIZE, tid)
        if failed and failed != errno.ESRCH:
            other = tracer_of(tid)
            return f"process {other} traces it already" if other else os.strerror(failed)
        if not failed:
            self._stopping[tid] = True
            _ptrace(_PTRACE_INTERRUPT, tid)
        return ""

    def _wait(self) -> None:
        give_up = time.monotonic() + _STOP_SECONDS
        pause = 0.0002
        while True:
            self.tend()
            running = [tid for tid in self._stopping if state_of_thread(self.pid, tid) not in ("D", "")]
            if not running or time.monotonic() > give_up:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def tend(self) -> None:
        """Take in what the threads report: that they stopped, with which signal pending, or that they ended."""
        for tid in [*self._stopping, *self._signals]:
            try:
                ended, status = os.waitpid(tid, os.WNOHANG | _WALL)
            except ChildProcessError:
                self._drop(tid)
                continue
            if ended == 0:
                continue
            if not os.WIFSTOPPED(status):
                self._drop(tid)
                continue
            self._stopping.pop(tid, None)
            is_event = status >> 16 != 0
            # A signal-delivery-stop came before ours: the signal must reach the thread when it goes on.
            self._signals[tid] = 0 if is_event else os.WSTOPSIG(status)

    def _drop(self, tid: int) -> None:
        self._stopping.pop(tid, None)
        self._signals.pop(tid, None)

    def close(self) -> bool:
        """Let every stopped thread go on; whether that is all of them.

        A thread in D state cannot be let go before it has stopped: close again later, or end, which frees it.
        """
        self.tend()
        for tid, pending in self._signals.items():
            _ptrace(_PTRACE_DETACH, tid, pending)
        self._signals.clear()
        return not self._stopping


def state_of_thread(pid: int, tid: int) -> str:
    """As ``state_of``, of one thread."""
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
