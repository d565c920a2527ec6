"""The keeper: the one process of a node that owns the ledger and the clock, answers requests and starts hands.

Single-threaded, driven by descriptors: callers' sockets, hands' socket pairs, owners' pidfds, the standby's connection.
It never touches a faulted object or a path that can hang: hands do, and they can be killed.
"""

import gc
import importlib
import math
import os
import selectors
import signal
import socket
import time
from typing import Any, Callable, Dict, Optional

from chaosgpu import __version__
from chaosgpu.changes.errors import BadArgument, ChaosgpuError
from chaosgpu.node import desk, places, supervisor, wire
from chaosgpu.node.injections import Caller, Injections, error
from chaosgpu.node.log import logger

BEAT_SECONDS = 0.3  # to the standby or systemd, while a record is open; nothing beats at rest
STANDBY_PAUSE_SECONDS = 0.1  # between two starts of a standby that dies
IDLE_SECONDS = 60.0


class BecomeStandby(BaseException):
    """Raised in a forked child: unwinds the keeper's frames, and with them its copies of every descriptor."""


class Connection(Caller):
    """A caller, or the standby. What its socket does not take at once is sent when it can take more."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, hear: Callable[["Connection"], None]
    ) -> None:
        self.line = wire.Line(sock)
        self.pid = wire.peer(sock).pid
        self.closed = False
        self._selector = selector
        self._data = lambda _: hear(self)
        selector.register(sock, selectors.EVENT_READ, self._data)

    def reply(self, message: Dict[str, Any]) -> None:
        if not self.closed:
            self.line.send(message)
            self.watch()

    def watch(self) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.line.unsent else 0)
        self._selector.modify(self.line.sock, wanted, self._data)

    def close(self) -> None:
        self.closed = True
        self._selector.unregister(self.line.sock)
        self.line.close()


class Keeper:
    """The loop: sockets, signals, the standby, the beat. ``serve`` runs until nothing is left to keep, or SIGTERM."""

    def __init__(self, listener: socket.socket, bundle: str) -> None:
        self.listener = listener
        self.bundle = bundle
        self.selector = selectors.DefaultSelector()
        self.supervisor = supervisor.find()
        self.injections = Injections(self.selector, self.supervisor, self._opened, self._settled)
        self.standby: Optional[Connection] = None
        self.standby_pid = 0
        self.standby_started = -math.inf
        self.idle_since = places.boottime()
        self.next_beat = math.inf
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    # --- life

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda _: os.read(wake_read, 512) and None)
        self.injections.recover()
        supervisor.notify("READY=1")
        while not self._may_leave():
            for key, _ in self.selector.select(self._seconds_to_next()):
                try:
                    key.data(key.fileobj)
                except Exception:
                    logger().exception("a request or a hand broke the keeper's code; the rest goes on")
            self._reap()
            self.injections.tick()
            now = places.boottime()
            if self._wants_standby() and now - self.standby_started >= STANDBY_PAUSE_SECONDS:
                self._fork_standby(now)
            if now >= self.next_beat:
                self._beat()
        self._leave()

    def _on_terminate(self, *_: Any) -> None:
        logger().info("SIGTERM: undoing everything, then leaving")
        self.injections.leaving = True

    def _may_leave(self) -> bool:
        if self.injections.leaving:
            return all(injection.state == "stuck" for injection in self.injections.open.values())
        return not self.injections.open and places.boottime() - self.idle_since > IDLE_SECONDS

    def _leave(self) -> None:
        if self.standby is not None:
            self.standby.reply({"leave": True})
        os.unlink(places.socket_path())
        give_up = time.monotonic() + 0.5
        while self.standby_pid and time.monotonic() < give_up:
            self._reap()
            time.sleep(0.01)
        supervisor.leave_cgroups()
        logger().info("nothing is left to keep: leaving")
        supervisor.leave(self.supervisor)

    def _seconds_to_next(self) -> float:
        idle = math.inf if self.injections.open else self.idle_since + IDLE_SECONDS + 0.01
        standby = self.standby_started + STANDBY_PAUSE_SECONDS if self._wants_standby() else math.inf
        return max(0.0, min(self.injections.next_instant(), self.next_beat, standby, idle) - places.boottime())

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.standby_pid:
                self._set_standby(None, 0)

    # --- the guard

    def _opened(self) -> None:
        """The first record is about to be opened, or one more: from here on silence is a sign of sickness."""
        if self.supervisor == "systemd":
            supervisor.notify(f"WATCHDOG_USEC={supervisor.WATCHDOG_USEC}")
        self._beat()

    def _settled(self) -> None:
        """Something was closed: when it was the last, the beat stops and the idle clock starts."""
        if self.injections.open:
            return
        self.idle_since = places.boottime()
        self.next_beat = math.inf
        if self.standby is not None:
            self.standby.reply({"open": False})
        if self.supervisor == "systemd":
            supervisor.notify("WATCHDOG_USEC=0")

    def _beat(self) -> None:
        self.next_beat = places.boottime() + BEAT_SECONDS
        if self.standby is not None:
            self.standby.reply({"open": True})
        if self.supervisor == "systemd":
            supervisor.notify("WATCHDOG=1")

    def _fork_standby(self, now: float) -> None:
        """Forked, not executed: with everything imported it stands ready in milliseconds, before the next kill."""
        self.standby_started = now
        try:
            pid = os.fork()
        except OSError as problem:
            logger().error("no standby can be started (%s)", problem.strerror)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            raise BecomeStandby
        self._set_standby(None, pid)

    def _wants_standby(self) -> bool:
        return self.supervisor != "systemd" and self.standby_pid == 0 and not self.injections.leaving

    def _set_standby(self, connection: Optional["Connection"], pid: int) -> None:
        self.standby, self.standby_pid = connection, pid
        self.injections.house = [own for own in (os.getpid(), pid) if own]

    # --- connections

    def _accept(self, _: Any) -> None:
        try:
            sock, _address = self.listener.accept()
        except OSError:
            return
        if wire.peer(sock).uid not in (0, os.geteuid()):
            sock.close()
            return
        Connection(sock, self.selector, self._hear)

    def _hear(self, connection: Connection) -> None:
        for message in connection.line.receive():
            try:
                self._answer(connection, message)
            except ChaosgpuError as problem:
                connection.reply(error(problem.kind, f"{self.injections.node}: {problem}"))
            except (TypeError, ValueError, KeyError, AttributeError) as problem:
                logger().exception("a malformed request")
                connection.reply(error("bad-argument", f"{self.injections.node}: malformed request: {problem!r}"))
        if connection.line.eof or not connection.line.flush():
            self._hang_up(connection)
        elif not connection.closed:
            connection.watch()

    def _hang_up(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.close()
        if connection is self.standby:
            self._set_standby(None, 0)
            logger().warning("the standby is gone: starting another")
        self.injections.caller_gone(connection)

    def _answer(self, connection: Connection, message: Dict[str, Any]) -> None:
        operation = message.get("op")
        if operation == "hello":
            connection.reply(self._hello())
        elif operation == "standby":
            self._set_standby(connection, connection.pid)
            connection.reply({"open": bool(self.injections.open)})
        elif operation == "leave":
            self.injections.leaving = self.injections.leaving or not self.injections.open
            connection.reply({"leaving": self.injections.leaving})
        elif operation == "inject":
            self.injections.inject(connection, message)
        elif operation in desk.REQUESTS:
            desk.REQUESTS[operation](self.injections, message, connection.reply)
        else:
            raise BadArgument(f"there is no operation {operation!r}")

    def _hello(self) -> Dict[str, Any]:
        return {
            "wire": wire.WIRE,
            "version": __version__,
            "bundle": os.path.basename(self.bundle),
            "pid": os.getpid(),
            "standby": self.standby_pid if self.standby is not None else 0,
            "state_dir": self.injections.state_dir,
            "supervisor": self.supervisor,
            "open": len(self.injections.open),
        }


def main(bundle: str) -> None:
    """Run as the keeper until there is nothing to keep. The caller holds the lock already."""
    places.private_dir(places.run_dir())
    places.private_dir(places.state_dir())
    path = places.socket_path()
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    old = os.umask(0o177)
    listener.bind(path)
    os.umask(old)
    listener.listen(64)
    logger()  # imports its library now, not in the middle of an undo
    importlib.import_module("chaosgpu.helpers.duty")
    gc.collect()
    gc.freeze()
    Keeper(listener, bundle).serve()
