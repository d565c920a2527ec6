"""Hands as the keeper sees them: forked with everything imported, heard over a socket pair, killed when overdue."""

import os
import selectors
import signal
import socket
from typing import Any, Callable, Dict, Optional

from chaosgpu.node import hand, wire

Hear = Callable[[Dict[str, Any]], None]


class Hand:
    """One running hand. ``hear`` gets its messages, ``gone`` is called once when its end of the socket is closed."""

    def __init__(
        self, task: Dict[str, Any], selector: selectors.BaseSelector, hear: Hear, gone: Callable[[], None]
    ) -> None:
        """Fork it. Raises OSError when no process can be started."""
        ours, theirs = socket.socketpair()
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            _close_all_but(theirs.fileno())
            hand.run(task, theirs)
        theirs.close()
        self.line: Optional[wire.Line] = wire.Line(ours)
        self._selector = selector
        self._hear, self._gone = hear, gone
        selector.register(ours, selectors.EVENT_READ, self._receive)

    def _receive(self, _: Any) -> None:
        line = self.line
        if line is None:
            return
        for message in line.receive():
            self._hear(message)
            if self.line is None:
                return
        if line.eof:
            self.drop()
            self._gone()

    def say(self, message: Dict[str, Any]) -> None:
        if self.line is not None:
            self.line.send(message)

    def drop(self) -> None:
        """Hang up and make sure it ends."""
        if self.line is None:
            return
        self._selector.unregister(self.line.sock)
        self.line.close()
        self.line = None
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _close_all_but(keep: int) -> None:
    """In the child: drop everything of the keeper's, since a copy of a socket would hide an EOF from its other end.

    The objects stay referenced by the frames below and are never collected, so none of them closes a reused number.
    """
    signal.set_wakeup_fd(-1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own descriptor
