"""A stopped process, by ptrace or by SIGSTOP, and a signal that cannot be taken back.

ptrace is preferred (chaosgpu.helpers.tracer): what it stops runs again when its tracer dies.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple

from chaosgpu.changes.base import ALREADY, FD, LOST, RESTORED, Change, Described, Undone, start_time_ticks
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.helpers.tracer import CannotTrace, Tracer, state_of, state_of_thread, threads, tracer_of

_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class StoppedByPtrace(Change):
    """Process ``pid`` with all its threads stands still while the hand holds it."""

    kind: ClassVar[str] = "process.traced"
    bound: ClassVar[str] = FD

    pid: int
    start: int

    def keys(self) -> List[str]:
        return [f"process:{self.pid}/{self.start}"]

    def name(self) -> str:
        return f"process {self.pid}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "running", "stopped"

    def apply(self, grip: Grip) -> Any:
        tracer = Tracer(self.pid, self.start)
        grip.keep(f"tracer-{self.pid}", tracer)
        try:
            held = tracer.stop()
        except CannotTrace as error:
            raise ChangeFailed(str(error)) from None
        if not held:
            raise Moved(f"process {self.pid} has ended")
        return {"threads": held, "state": state_of(self.pid)}

    def holds(self, grip: Grip) -> bool:
        return start_time_ticks(self.pid) == self.start and any(
            state_of_thread(self.pid, tid) == "t" and _is_ours(tracer_of(tid)) for tid in threads(self.pid)
        )

    def undo(self, observed: Any, grip: Grip) -> Undone:
        tracer = grip.let_go(f"tracer-{self.pid}")
        if tracer is not None:
            tracer.close()
        if start_time_ticks(self.pid) != self.start:
            return Undone(LOST, f"process {self.pid} has ended")
        if tracer is None:
            return Undone(ALREADY, "it runs again since its tracer ended")
        give_up = time.monotonic() + 1.0
        while self.holds(grip) and time.monotonic() < give_up:
            time.sleep(0.001)
        return Undone(RESTORED)

    def describe(self) -> Described:
        return Described(
            f"gdb --batch -p {self.pid}  # and leave it attached",
            f't=$(awk \'/^TracerPid/{{print $2}}\' /proc/{self.pid}/status); [ "$t" = 0 ] || kill -KILL "$t"',
        )


@dataclass(frozen=True)
class StoppedBySignal(Change):
    """Process ``pid`` is stopped by SIGSTOP: for one that cannot be traced. It stays so until SIGCONT."""

    kind: ClassVar[str] = "process.stopped"

    pid: int
    start: int

    def keys(self) -> List[str]:
        return [f"process:{self.pid}/{self.start}"]

    def name(self) -> str:
        return f"process {self.pid}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "running", "stopped"

    def apply(self, grip: Grip) -> Any:
        if not send(self.pid, self.start, signal.SIGSTOP):
            raise Moved(f"process {self.pid} has ended")
        give_up = time.monotonic() + _STOP_SECONDS  # a thread in state D stops when it comes out of the kernel
        while not _all_stand(self.pid) and time.monotonic() < give_up:
            time.sleep(0.001)
        return state_of(self.pid)

    def holds(self, grip: Grip) -> bool:
        return start_time_ticks(self.pid) == self.start and not _await_running(self.pid, seconds=0.05)

    def undo(self, observed: Any, grip: Grip) -> Undone:
        if start_time_ticks(self.pid) != self.start:
            return Undone(LOST, f"process {self.pid} has ended")
        if not _stopped(self.pid):
            return Undone(ALREADY)
        send(self.pid, self.start, signal.SIGCONT)
        _await_running(self.pid)
        return Undone(RESTORED)

    def describe(self) -> Described:
        return Described(f"kill -STOP {self.pid}", f"kill -CONT {self.pid}")


@dataclass(frozen=True)
class SignalSent(Change):
    """A signal to some processes, then SIGKILL to those alive after a grace; nothing of it can be taken back."""

    kind: ClassVar[str] = "process.signal"

    processes: List[List[int]]  # [pid, start]
    signal_name: str
    grace_seconds: Optional[float] = None

    def keys(self) -> List[str]:
        return [f"process:{pid}/{start}" for pid, start in self.processes]

    def name(self) -> str:
        return f"processes {', '.join(str(pid) for pid, _ in self.processes)}"

    def apply(self, grip: Grip) -> Any:
        number = getattr(signal, "SIG" + self.signal_name)
        sent = [pid for pid, start in self.processes if send(pid, start, number)]
        if self.grace_seconds is None:
            return {"sent": sent, "killed": []}
        give_up = time.monotonic() + self.grace_seconds
        while time.monotonic() < give_up and self.alive():
            time.sleep(0.02)
        killed = [pid for pid, start in self.alive() if send(pid, start, signal.SIGKILL)]
        return {"sent": sent, "killed": killed}

    def alive(self) -> List[List[int]]:
        return [[pid, start] for pid, start in self.processes if start_time_ticks(pid) == start]

    def holds(self, grip: Grip) -> bool:
        return False

    def undo(self, observed: Any, grip: Grip) -> Undone:
        return Undone(ALREADY, "a signal cannot be taken back: restarting is the workload's part")

    def describe(self) -> Described:
        pids = " ".join(str(pid) for pid, _ in self.processes)
        return Described(f"kill -{self.signal_name} {pids}", "true  # a signal cannot be taken back")


def send(pid: int, start: int, number: int) -> bool:
    """Signal exactly that process, by pidfd (pidfd_send_signal(2)); False when it is gone or another has its pid."""
    fd = -1
    try:
        fd = os.pidfd_open(pid)
        if start_time_ticks(pid) != start:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        raise ChangeFailed(f"process {pid} may not be signalled: run as root") from None
    except OSError as error:
        raise ChangeFailed(f"process {pid} cannot be signalled: {error.strerror} (Linux 5.3 or newer?)") from None
    finally:
        if fd >= 0:
            os.close(fd)


def _is_ours(tracer: int) -> bool:
    """Whether a tracer is a hand or helper, and no debugger: all are forked from one keeper, so they share its name."""
    try:
        with open(f"/proc/{tracer}/cmdline", "rb") as theirs, open("/proc/self/cmdline", "rb") as own:
            return theirs.read() == own.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stopped(pid: int) -> bool:
    """Stopped by a signal: T, or t while somebody traces it, who may be what kept us from ptrace."""
    return state_of(pid) in ("T", "t")


def _all_stand(pid: int) -> bool:
    """Whether no thread of a process runs: each stops by itself, some time after the first has (signal(7))."""
    return all(state_of_thread(pid, tid) in ("T", "t", "Z", "X", "") for tid in threads(pid))


def _await_running(pid: int, seconds: float = _STOP_SECONDS) -> bool:
    """Wait until a process is not stopped; whether it came so far (a process that ended did)."""
    give_up = time.monotonic() + seconds
    while _stopped(pid):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True
