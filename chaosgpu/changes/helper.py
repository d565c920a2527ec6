"""A helper process: its life is the effect, so the effect ends with it, and it ends with the hand."""

import importlib
import os
import select
import signal
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Tuple

from chaosgpu.changes.base import ALREADY, FD, REMOVED, Change, Described, Undone
from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.grip import Grip, die_with_parent

READY_SECONDS = 10.0


class _Running:
    """The hand's hold on a helper. ``tend`` notices when it died before its time."""

    def __init__(self, pid: int, name: str) -> None:
        self.pid, self.name = pid, name
        self.ended: Optional[int] = None

    def tend(self) -> None:
        if not self.alive():
            raise ChangeFailed(f"helper {self.name} (pid {self.pid}) ended before its time")

    def alive(self) -> bool:
        if self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = status
        return self.ended is None

    def close(self) -> None:
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            _, self.ended = os.waitpid(self.pid, 0)


@dataclass(frozen=True)
class HelperProcess(Change):
    """``chaosgpu.helpers.<helper>.run(arguments, ready)`` in a child of the hand that dies with it.

    The helper calls ``ready()`` once its effect is in place. ``works_on`` are the conflict keys of what it works on.
    """

    kind: ClassVar[str] = "helper"
    bound: ClassVar[str] = FD

    helper: str
    works_on: List[str]
    arguments: Dict[str, Any] = field(default_factory=dict)

    def keys(self) -> List[str]:
        return self.works_on

    def name(self) -> str:
        return f"helper {self.helper} on {', '.join(self.works_on)}"

    def _place(self) -> str:
        """Where the hand keeps it."""
        return f"helper-{self.helper}-{self.works_on[0]}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "absent", "running"

    def apply(self, grip: Grip) -> Any:
        module = importlib.import_module(f"chaosgpu.helpers.{self.helper}")
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        hand = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(module, ready_write, grip, hand)
        os.close(ready_write)
        running = _Running(pid, self.helper)
        grip.keep(self._place(), running)
        select.select([ready_read], [], [], READY_SECONDS)
        os.set_blocking(ready_read, False)
        try:
            word = os.read(ready_read, 4096)
        except BlockingIOError:
            word = b""
        os.close(ready_read)
        if word != b"ready":
            running.close()
            raise ChangeFailed(f"{self.name()}: {word.decode(errors='replace') or 'it did not begin in time'}")
        return {"pid": pid}

    def _become(self, module: Any, ready_write: int, grip: Grip, hand: int) -> None:
        """In the child: drop the hand's descriptors (a copy would hide an EOF from the keeper), then be the helper."""
        try:
            die_with_parent()
            if os.getppid() != hand:
                os._exit(1)  # it died before the kernel was asked
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in (ready_write, grip.lock_fd):
                    try:
                        os.close(int(name))
                    except OSError:
                        pass  # the listing's own descriptor
            module.run(self.arguments, lambda: os.write(ready_write, b"ready"))
        except BaseException as error:
            os.write(ready_write, f"{type(error).__name__}: {error}".encode()[:500])
        finally:
            os._exit(1)

    def holds(self, grip: Grip) -> bool:
        running = grip.kept(self._place())
        return running is not None and running.alive()

    def undo(self, observed: Any, grip: Grip) -> Undone:
        running = grip.let_go(self._place())
        if running is None or not running.alive():
            return Undone(ALREADY, "the helper has ended")
        running.close()
        return Undone(REMOVED)

    def describe(self) -> Described:
        return Described(f"# helper {self.helper} {self.arguments}", "# it ends with the hand: nothing to do by hand")
