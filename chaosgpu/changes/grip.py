"""What a hand holds while it works: descriptors, children, the injection's lock, and its way to run commands."""

import ctypes
import os
import signal
import subprocess
from typing import Any, Dict, List, Optional, Tuple

from chaosgpu.changes.errors import ChangeFailed

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
COMMAND_SECONDS = 10.0


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent thread ends (prctl(2), PR_SET_PDEATHSIG)."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Grip:
    """The hand's resources. ``lock_fd`` is the injection's flock: children inherit it, which makes them limbs.

    A change whose effect lives in this process keeps its resource here under its own key, and looks there first when it
    undoes; a fresh hand after a crash finds nothing and judges by the kernel alone.
    """

    def __init__(self, injection: str, lock_fd: Optional[int] = None) -> None:
        self.injection = injection
        self.lock_fd = lock_fd
        self._kept: Dict[str, Any] = {}

    def keep(self, key: str, resource: Any) -> None:
        self._kept[key] = resource

    def kept(self, key: str) -> Any:
        return self._kept.get(key)

    def let_go(self, key: str) -> Any:
        return self._kept.pop(key, None)

    def run(
        self, argv: List[str], *, seconds: float = COMMAND_SECONDS, check: bool = True, stdin: Optional[str] = None
    ) -> Tuple[int, str, str]:
        """Run one command as a limb, never through a shell; (exit status, stdout, stderr), texts stripped.

        It ends at the time limit, and a long one (over ``COMMAND_SECONDS``) with this process; a short one is left to
        the barrier, since asking the kernel for a parent-death signal costs more than the command does. With ``check``
        a status other than 0 raises ChangeFailed with the command and its first line of complaint.
        """
        shown = " ".join(argv)
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=() if self.lock_fd is None else (self.lock_fd,),
                preexec_fn=die_with_parent if seconds > COMMAND_SECONDS else None,
                cwd="/",
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ChangeFailed(f"cannot run `{shown}`: {error.strerror or error} (is {argv[0]} installed?)") from None
        try:
            out, err = child.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise ChangeFailed(f"`{shown}` did not finish in {seconds:g} s") from None
        if check and child.returncode != 0:
            complaint = (err.strip() or out.strip() or f"exit status {child.returncode}").splitlines()[0]
            raise ChangeFailed(f"`{shown}`: {complaint}")
        return child.returncode, out.strip(), err.strip()

    def tend(self) -> None:
        """Let every kept resource look after its children (reap, pass signals on). Called on each SIGCHLD.

        Raises ChangeFailed when one has lost its effect, such as a helper that died.
        """
        for resource in list(self._kept.values()):
            tend = getattr(resource, "tend", None)
            if tend is not None:
                tend()

    def close(self) -> None:
        """End every effect that lives in this process: the last thing a hand does."""
        for key in list(self._kept):
            resource = self._kept.pop(key)
            close = getattr(resource, "close", None)
            if isinstance(resource, int):
                os.close(resource)
            elif close is not None:
                close()
