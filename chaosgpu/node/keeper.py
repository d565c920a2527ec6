"""The keeper: the one process of a node that owns the ledger and the clock, answers requests and starts hands.

Single-threaded, driven by descriptors: callers' sockets, hands' socket pairs, owners' pidfds, the standby's connection.
It never touches a faulted object or a path that can hang: hands do, and they can be killed.
"""

import datetime
import fcntl
import gc
import math
import os
import secrets
import selectors
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from chaosgpu import __version__
from chaosgpu.changes.base import start_time_ticks
from chaosgpu.changes.errors import BadArgument, ChaosgpuError
from chaosgpu.faults.base import CATALOGUE, build
from chaosgpu.node import hand, keys, ledger, places, supervisor, wire
from chaosgpu.node.log import logger

STANDBY_PAUSE_SECONDS = 0.1  # between two starts of a standby that dies
BEAT_SECONDS = 0.3  # to the standby or systemd, while a record is open; nothing beats at rest
IDLE_SECONDS = 60.0
SURVEY_SECONDS = 30.0
APPLY_SECONDS = 120.0
UNDO_SECONDS = 20.0
WARM_UNDO_SECONDS = 5.0  # for a waiting hand's answer, before a fresh one is started
LONGEST_RETRY_SECONDS = 60.0
RECENT = 50

Reply = Callable[[Dict[str, Any]], None]


def error(kind: str, message: str) -> Dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


class BecomeStandby(BaseException):
    """Raised in a forked child: unwinds the keeper's frames, and with them its copies of every descriptor."""


class Injection:
    """One injection while it is open: its record, its hand if there is one, and who waits for it."""

    def __init__(self, identity: str, request: Dict[str, Any], state: str) -> None:
        self.id = identity
        self.request = request
        self.state = state  # surveying | applying | active | undoing | stuck | closed
        self.record: Optional[ledger.Record] = None
        self.pid = 0
        self.line: Optional[wire.Line] = None
        self.hand_waits = False  # the hand stays for the keeper's word (fd-bound, or failed)
        self.limit = math.inf  # boot-time instant by which the hand must have done its present step
        self.retry_at = math.inf
        self.retry_seconds = 1.0
        self.deadline_boottime = math.inf
        self.deadline_wall = math.inf
        self.owner_fd: Optional[int] = None
        self.owner_conn: Optional["Connection"] = None
        self.owner_process: Optional[Dict[str, int]] = None
        self.untouched_from: Optional[int] = None
        self.failure: Optional[Dict[str, Any]] = None
        self.result: Dict[str, Any] = {}
        self.stuck: List[str] = []
        self.on_active: List[Reply] = []
        self.on_closed: List[Reply] = []

    @property
    def open(self) -> bool:
        return self.state != "closed"


class Connection:
    """A caller, or the standby. What its socket does not take at once is sent when it can take more."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, hear: Callable[["Connection"], None]
    ) -> None:
        self.line = wire.Line(sock)
        self.peer = wire.peer(sock)
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
    """The loop and its state. ``serve`` runs until there is nothing to keep, or SIGTERM has been obeyed."""

    def __init__(self, listener: socket.socket, bundle: str) -> None:
        self.listener = listener
        self.bundle = bundle
        self.state_dir = places.state_dir()
        self.boot_id = places.boot_id()
        self.node = os.uname().nodename
        self.supervisor = supervisor.find()
        self.injections: Dict[str, Injection] = {}
        self.records: List[ledger.Record] = []  # closed ones, oldest first
        self.answers: Dict[str, str] = {}  # request id -> injection id
        self.standby: Optional[Connection] = None
        self.standby_pid = 0
        self.standby_started = -math.inf
        self.idle_since = places.boottime()
        self.next_beat = -math.inf
        self.leaving = False
        self.selector = selectors.DefaultSelector()
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
        self._recover()
        supervisor.notify("READY=1")
        while not self._may_leave():
            for key, _ in self.selector.select(self._seconds_to_next()):
                try:
                    key.data(key.fileobj)
                except Exception:
                    logger().exception("a request or a hand broke the keeper's code; the rest goes on")
            self._reap()
            self._tick()
        self._leave()

    def _on_terminate(self, *_: Any) -> None:
        logger().info("SIGTERM: undoing everything, then leaving")
        self.leaving = True

    def _may_leave(self) -> bool:
        if self.leaving:
            return all(injection.state == "stuck" for injection in self.injections.values())
        if self.injections:
            return False
        return places.boottime() - self.idle_since > IDLE_SECONDS

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

    def _seconds_to_next(self) -> Optional[float]:
        now = places.boottime()
        instants = [self.idle_since + IDLE_SECONDS + 0.01]
        opened = False
        for injection in self.injections.values():
            if injection.open:
                opened = True
                instants += [injection.limit, injection.retry_at]
                if injection.state in ("applying", "active"):
                    instants += [injection.deadline_boottime, injection.deadline_wall - time.time() + now]
        if opened:
            instants[0] = self.next_beat
        if self._wants_standby():
            instants.append(self.standby_started + STANDBY_PAUSE_SECONDS)
        return max(0.0, min(instants) - now)

    def _tick(self) -> None:
        now = places.boottime()
        for injection in list(self.injections.values()):
            if not injection.open:
                continue
            if injection.state in ("applying", "active"):
                if self.leaving:
                    self._undo(injection, "the keeper was told to stop (SIGTERM)")
                elif now >= injection.deadline_boottime or time.time() >= injection.deadline_wall:
                    self._undo(injection, "deadline")
            if self.leaving and injection.state == "surveying":
                self._drop_hand(injection)
                self._give_up(injection, error("failed", f"{self.node}: the keeper was told to stop (SIGTERM)"))
            if now >= injection.limit:
                self._overdue(injection)
            if now >= injection.retry_at:
                injection.retry_at = math.inf
                self._start_undo_hand(injection)
        if self._wants_standby() and now - self.standby_started >= STANDBY_PAUSE_SECONDS:
            self.standby_started = now
            self._fork_standby()
        opened = bool(self.injections)
        if opened and now >= self.next_beat:
            self.next_beat = now + BEAT_SECONDS
            self._beat(True)

    def _beat(self, opened: bool) -> None:
        if self.standby is not None:
            self.standby.reply({"open": opened})
        if self.supervisor == "systemd":
            supervisor.notify("WATCHDOG=1" if opened else "WATCHDOG_USEC=0")

    def _opened(self) -> None:
        if self.supervisor == "systemd":
            supervisor.notify(f"WATCHDOG_USEC={supervisor.WATCHDOG_USEC}")
        self.next_beat = places.boottime() + BEAT_SECONDS
        self._beat(True)

    def _settled(self) -> None:
        """Something was closed: when it was the last, the beat stops and the idle clock starts."""
        if not self.injections:
            self.idle_since = places.boottime()
            self._beat(False)

    def _fork_standby(self) -> None:
        """Forked, not executed: with everything imported it stands ready in milliseconds, before the next kill."""
        try:
            pid = os.fork()
        except OSError as problem:
            logger().error("no standby can be started (%s)", problem.strerror)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            raise BecomeStandby
        self.standby_pid = pid

    def _wants_standby(self) -> bool:
        return self.supervisor == "standby" and self.standby_pid == 0 and not self.leaving

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
                connection.reply(error(problem.kind, f"{self.node}: {problem}"))
            except (TypeError, ValueError, KeyError, AttributeError) as problem:
                logger().exception("a malformed request")
                connection.reply(error("bad-argument", f"{self.node}: malformed request: {problem!r}"))
        if connection.line.eof or not connection.line.flush():
            self._hang_up(connection)
        elif not connection.closed:
            connection.watch()

    def _hang_up(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.close()
        if connection is self.standby:
            self.standby, self.standby_pid = None, 0
            logger().warning("the standby is gone: starting another")
        for injection in list(self.injections.values()):
            if injection.owner_conn is connection:
                injection.owner_conn = None
                self._owner_gone(injection)

    def _answer(self, connection: Connection, message: Dict[str, Any]) -> None:
        operation = message.get("op")
        if operation == "hello":
            connection.reply(self._hello())
        elif operation == "standby":
            self.standby = connection
            self.standby_pid = connection.peer.pid
            opened = bool(self.injections)
            connection.reply({"open": opened})
        elif operation == "inject":
            self._inject(connection, message)
        elif operation == "revert":
            self._revert(connection, message)
        elif operation == "list":
            connection.reply({"node": self.node, "supervisor": self.supervisor, "faults": self._list(message)})
        elif operation == "record":
            connection.reply({"record": self._find_record(message["id"]).lines})
        elif operation == "verify":
            self._verify(connection, message)
        elif operation == "abandon":
            self._abandon(connection, message)
        elif operation == "leave":
            if not self.injections:
                self.leaving = True
            connection.reply({"leaving": self.leaving})
        else:
            raise BadArgument(f"there is no operation {operation!r}")

    def _hello(self) -> Dict[str, Any]:
        return {
            "wire": wire.WIRE,
            "version": __version__,
            "bundle": os.path.basename(self.bundle),
            "pid": os.getpid(),
            "state_dir": self.state_dir,
            "supervisor": self.supervisor,
            "open": len(self.injections),
        }

    # --- inject

    def _inject(self, connection: Connection, message: Dict[str, Any]) -> None:
        known = self.answers.get(message["request"])
        if known is not None:
            self._repeat(connection, known)
            return
        if self.leaving:
            raise ChaosgpuError("the keeper is leaving: try again in a second")
        if message["fault"] not in CATALOGUE:
            raise BadArgument(f"there is no fault {message['fault']!r} in this node's version {__version__}")
        fault = build(message["fault"], message["arguments"])
        declaration = fault.declaration
        if not message["dry_run"]:
            self._check_supervised(declaration.danger, message["allow"], "danger: hardware")
            others = {i.request["run"] for i in self.injections.values() if i.open} - {message["run"]}
            if others and "concurrent" not in message["allow"]:
                raise ChaosgpuError(
                    f"run {sorted(others)[0]} has a fault open on this node:"
                    " wait, revert it, or allow: ['concurrent'] to run two experiments here at once"
                )
        injection = Injection(secrets.token_hex(5), message, "surveying")
        injection.on_active.append(connection.reply)
        if not message["dry_run"]:
            self.answers[message["request"]] = injection.id
            self._take_owner(injection, connection)
        self.injections[injection.id] = injection
        self._opened()
        self._start_hand(
            injection,
            {
                "do": "inject",
                "fault": message["fault"],
                "arguments": message["arguments"],
                "allow": message["allow"],
                "house_pids": self._house_pids(connection.peer.pid),
                "deadline_boottime": places.boottime() + SURVEY_SECONDS + float(message["duration_seconds"]),
                "duration_seconds": float(message["duration_seconds"]),
            },
            SURVEY_SECONDS,
        )

    def _check_supervised(self, danger: str, allow: List[str], why: str) -> None:
        if danger == "hardware" and "hardware" not in allow:
            raise ChaosgpuError("this fault can leave hardware needing a person: say allow: ['hardware'] to go on")
        if danger == "hardware" and self.supervisor == "standby" and "unsupervised" not in allow:
            raise ChaosgpuError(
                f"only a standby process guards this node ({why}): run it under systemd, or allow: ['unsupervised']"
            )

    def _take_owner(self, injection: Injection, connection: Connection) -> None:
        """The injection lives no longer than its owner, unless ``outlive_run``: a process here, or a connection."""
        if injection.request["outlive_run"]:
            return
        injection.owner_conn = connection
        if injection.request["owner"] == "peer" and connection.peer.pid:
            pid = connection.peer.pid
            start = start_time_ticks(pid)
            if start is None:
                return  # it ended already; its connection says so too
            injection.owner_process = {"pid": pid, "start": start}
            injection.owner_fd = os.pidfd_open(pid)
            self.selector.register(injection.owner_fd, selectors.EVENT_READ, lambda _: self._owner_gone(injection))

    def _owner_gone(self, injection: Injection) -> None:
        self._release_owner(injection)
        if injection.state == "surveying":
            self._drop_hand(injection)
            self._give_up(injection, error("failed", f"{self.node}: the caller went away"))
        elif injection.state in ("applying", "active"):
            self._undo(injection, "its owner is gone")

    def _release_owner(self, injection: Injection) -> None:
        injection.owner_conn = None
        if injection.owner_fd is not None:
            self.selector.unregister(injection.owner_fd)
            os.close(injection.owner_fd)
            injection.owner_fd = None

    def _house_pids(self, caller: int) -> List[int]:
        pids = {os.getpid(), self.standby_pid, *places.ancestors(caller)} - {0}
        return sorted(pids)

    def _repeat(self, connection: Connection, identity: str) -> None:
        """A repeated request id gets the recorded answer, never a second fault."""
        injection = self.injections.get(identity)
        if injection is not None and injection.state in ("surveying", "applying"):
            injection.on_active.append(connection.reply)
        elif injection is not None and injection.result:
            connection.reply(injection.result)
        else:
            record = self._find_record(identity)
            active = record.last("active")
            undoing = record.last("undoing") or {}
            if active:
                connection.reply(active["result"])
            else:
                connection.reply(
                    error("failed", f"{self.node}: it was undone: {undoing.get('cause', 'unknown cause')}")
                )

    def _planned(self, injection: Injection, plan: Dict[str, Any]) -> None:
        request = injection.request
        if request["dry_run"]:
            self._reply_active(injection, {"dry_run": True, "node": self.node, "fault": request["fault"], **plan})
            self._drop_hand(injection)
            self._forget(injection)
            return
        for other in self.injections.values():
            if other is injection or other.record is None or not other.open:
                continue
            theirs = other.record.planned
            clash = keys.first_conflict(plan["keys"], theirs["keys"] + theirs["needs"]) or keys.first_conflict(
                plan["needs"], theirs["keys"]
            )
            if clash:
                self._drop_hand(injection)
                message = (
                    f"{self.node}: {clash[0]} is held by injection {other.id} ({theirs['fault']}): revert it first"
                )
                self._give_up(injection, error("refused", message))
                return
        try:
            if "disk" in plan["bounds"]:
                self._check_supervised("hardware", [*request["allow"], "hardware"], "the change survives a reboot")
            now, wall = places.boottime(), time.time()
            seconds = float(request["duration_seconds"])
            injection.deadline_boottime, injection.deadline_wall = now + seconds, wall + seconds
            injection.record = ledger.Record.create(
                self.state_dir,
                {
                    "id": injection.id,
                    "request": request["request"],
                    "run": request["run"],
                    "owner": request["owner"],
                    "owner_process": injection.owner_process,
                    "outlive_run": request["outlive_run"],
                    "fault": request["fault"],
                    "allow": request["allow"],
                    "boot_id": self.boot_id,
                    "at": wall,
                    "deadline_boottime": injection.deadline_boottime,
                    "deadline_wall": injection.deadline_wall,
                    "duration_seconds": seconds,
                    **plan,
                },
            )
        except ChaosgpuError as problem:
            self._drop_hand(injection)
            self._give_up(injection, error(problem.kind, f"{self.node}: {problem}"))
            return
        injection.state = "applying"
        injection.limit = places.boottime() + APPLY_SECONDS
        assert injection.line is not None
        injection.line.send({"do": "go", "deadline_boottime": injection.deadline_boottime})
        logger().info("%s %s planned, %d changes", injection.id, request["fault"], len(plan["changes"]))

    def _activated(self, injection: Injection, message: Dict[str, Any]) -> None:
        assert injection.record is not None
        planned = injection.record.planned
        result = {
            "injection": injection.id,
            "run": planned["run"],
            "fault": planned["fault"],
            "node": self.node,
            "state": "active",
            "changed": message["changed"],
            "proof": message["active"],
            "warnings": planned["warnings"],
            "deadline": _iso(injection.deadline_wall),
            "supervisor": self.supervisor,
            "undo": f"chaos gpu revert {injection.id}",
        }
        injection.result = result
        injection.state = "active"
        injection.limit = math.inf
        self._append(injection, {"line": "active", "at": time.time(), "result": result}, "disk" in planned["bounds"])
        logger().info("%s %s active until %s", injection.id, planned["fault"], result["deadline"])
        injection.hand_waits = "fd" in planned["bounds"]
        if CATALOGUE[planned["fault"]].declaration.reversible == "one-shot":
            for reply in injection.on_active:
                injection.on_closed.append(_one_shot_answer(reply, result))
            injection.on_active = []
            self._undo(injection, "one-shot: nothing stays in place")
        else:
            self._reply_active(injection, result)
            # From here on only the owner's process counts; a caller may close its connection.
            if injection.owner_fd is not None:
                injection.owner_conn = None

    def _reply_active(self, injection: Injection, message: Dict[str, Any]) -> None:
        for reply in injection.on_active:
            reply(message)
        injection.on_active = []

    def _give_up(self, injection: Injection, answer: Dict[str, Any]) -> None:
        """End an injection that has no record: nothing was touched."""
        self._reply_active(injection, answer)
        self._forget(injection)

    def _forget(self, injection: Injection) -> None:
        self._release_owner(injection)
        injection.state = "closed"
        self.injections.pop(injection.id, None)
        if injection.record is None:
            self.answers.pop(injection.request["request"], None)
            _unlink(self._lock_path(injection.id))
        self._settled()

    # --- hands

    def _lock_path(self, identity: str) -> str:
        return os.path.join(self.state_dir, identity + ".lock")

    def _start_hand(self, injection: Injection, task: Dict[str, Any], limit_seconds: float) -> None:
        task = {"id": injection.id, "lock": self._lock_path(injection.id), "state_dir": self.state_dir, **task}
        if injection.request.get("dry_run") and task["do"] == "inject":
            task["lock"] = ""
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as problem:
            ours.close()
            theirs.close()
            self._no_hand(injection, f"no process can be started ({problem.strerror})")
            return
        if pid == 0:
            self._become_hand(theirs)
            hand.run(task, theirs)
        theirs.close()
        injection.pid, injection.line = pid, wire.Line(ours)
        injection.limit = places.boottime() + limit_seconds
        injection.hand_waits = False
        self.selector.register(ours, selectors.EVENT_READ, lambda _: self._hear_hand(injection))

    def _become_hand(self, keep: socket.socket) -> None:
        """Close everything of the keeper's in the child: a copy of a socket would hide an EOF from its other end."""
        signal.set_wakeup_fd(-1)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != keep.fileno():
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the listing's own descriptor

    def _no_hand(self, injection: Injection, why: str) -> None:
        if injection.record is None:
            self._give_up(injection, error("failed", f"{self.node}: {why}"))
        else:
            self._mark_stuck(injection, [why])

    def _drop_hand(self, injection: Injection) -> None:
        if injection.line is not None:
            self.selector.unregister(injection.line.sock)
            injection.line.close()
            injection.line = None
        if injection.pid:
            try:
                os.kill(injection.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            injection.pid = 0
        injection.hand_waits = False
        injection.limit = math.inf

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.standby_pid:
                self.standby_pid = 0
            for injection in self.injections.values():
                if injection.pid == pid:
                    injection.pid = 0  # its socket tells the rest

    def _hear_hand(self, injection: Injection) -> None:
        line = injection.line
        assert line is not None
        for message in line.receive():
            self._hand_says(injection, message)
            if injection.line is not line:
                return
        if line.eof:
            self._hand_gone(injection)

    def _hand_says(self, injection: Injection, message: Dict[str, Any]) -> None:
        if "surveyed" in message:
            self._planned(injection, message["surveyed"])
        elif "applied" in message:
            durable = injection.record is not None and "disk" in injection.record.planned["bounds"]
            self._append(
                injection, {"line": "applied", "change": message["applied"], "observed": message["observed"]}, durable
            )
        elif "active" in message:
            self._activated(injection, message)
        elif "failed" in message:
            self._failed(injection, message)
        elif "undone" in message:
            self._undone(injection, message)

    def _failed(self, injection: Injection, message: Dict[str, Any]) -> None:
        failure = dict(message["failed"])
        failure["message"] = f"{self.node}: {failure['message']}"
        if injection.record is None:
            self._drop_hand(injection)
            self._give_up(injection, {"error": failure})
            return
        injection.failure = failure
        injection.untouched_from = message["untouched_from"]
        injection.hand_waits = failure["kind"] != "internal" and injection.state == "applying"
        if injection.state == "applying":
            self._undo(injection, failure["message"])
        else:
            self._drop_hand(injection)
            self._mark_stuck(injection, [failure["message"]])

    def _hand_gone(self, injection: Injection) -> None:
        self._drop_hand(injection)
        if injection.state == "surveying":
            self._give_up(injection, error("failed", f"{self.node}: the survey ended without an answer (killed?)"))
        elif injection.state == "applying":
            injection.failure = {"kind": "failed", "message": f"{self.node}: the hand died while it applied the fault"}
            self._undo(injection, "the hand died while it applied the fault")
        elif (
            injection.state == "active" and injection.record is not None and "fd" in injection.record.planned["bounds"]
        ):
            self._undo(injection, "the hand that held the fault died")
        elif injection.state == "undoing":
            self._mark_stuck(injection, ["the hand died while it undid the fault"])

    def _overdue(self, injection: Injection) -> None:
        injection.limit = math.inf
        if injection.state == "surveying":
            self._drop_hand(injection)
            self._give_up(injection, error("failed", f"{self.node}: the survey took longer than {SURVEY_SECONDS:g} s"))
        elif injection.state == "applying":
            injection.failure = {"kind": "failed", "message": f"{self.node}: not in place after {APPLY_SECONDS:g} s"}
            self._undo(injection, "it took too long to apply")
        elif injection.state == "undoing" and injection.hand_waits:
            self._start_undo_hand(injection)
        elif injection.state == "undoing":
            self._drop_hand(injection)
            self._mark_stuck(injection, [f"the undo took longer than {UNDO_SECONDS:g} s"])

    # --- undo

    def _undo(self, injection: Injection, cause: str) -> None:
        assert injection.record is not None
        if injection.state not in ("applying", "active"):
            return
        waits = injection.hand_waits and injection.line is not None
        injection.state = "undoing"
        if injection.failure is None and not injection.result:
            injection.failure = {"kind": "failed", "message": f"{self.node}: undone before it was in place: {cause}"}
        self._append(
            injection,
            {"line": "undoing", "at": time.time(), "cause": cause, "untouched_from": injection.untouched_from},
        )
        logger().info("%s undoing: %s", injection.id, cause)
        if waits:
            assert injection.line is not None
            injection.limit = places.boottime() + WARM_UNDO_SECONDS
            injection.line.send({"do": "undo"})
        else:
            self._start_undo_hand(injection)

    def _start_undo_hand(self, injection: Injection) -> None:
        assert injection.record is not None
        self._drop_hand(injection)
        injection.state = "undoing"
        record = injection.record
        self._start_hand(
            injection,
            {
                "do": "undo",
                "record": record.planned,
                "observed": record.observed(),
                "untouched_from": injection.untouched_from,
            },
            UNDO_SECONDS,
        )

    def _undone(self, injection: Injection, message: Dict[str, Any]) -> None:
        assert injection.record is not None
        self._drop_hand(injection)
        if message["stuck"]:
            self._mark_stuck(injection, message["stuck"])
            return
        self._close(injection, message["undone"], message["restored"])

    def _mark_stuck(self, injection: Injection, why: List[str]) -> None:
        """Not undone: say so, loudly, and try again with back-off until it is."""
        injection.state = "stuck"
        injection.stuck = why
        injection.limit = math.inf
        injection.retry_at = places.boottime() + injection.retry_seconds
        injection.retry_seconds = min(injection.retry_seconds * 2, LONGEST_RETRY_SECONDS)
        logger().error("%s STUCK: %s", injection.id, "; ".join(why))
        for reply in injection.on_closed:
            reply(self._summary(injection))
        failure = injection.failure or {"kind": "failed", "message": f"{self.node}: {why[0]}"}
        self._reply_active(injection, {"error": {**failure, "stuck": why, "injection": injection.id}})
        injection.on_closed = []

    def _close(self, injection: Injection, verdicts: Dict[str, Any], restored: Dict[str, Any]) -> None:
        assert injection.record is not None
        planned = injection.record.planned
        cause = (injection.record.last("undoing") or {}).get("cause", "")
        early = (
            bool(injection.result)
            and not cause.startswith("one-shot")
            and any(verdict in ("superseded", "already", "lost") for verdict, _ in verdicts.values())
        )
        closed = {
            "line": "closed",
            "at": time.time(),
            "verdicts": {index: verdicts[index] for index in sorted(verdicts, key=int)},
            "restored": restored,
            "ended_early": early,
        }
        self._append(injection, closed, "disk" in planned["bounds"])
        injection.record.settle()
        injection.state = "closed"
        told = {**self._summary(injection), "verdicts": closed["verdicts"], "restored": restored, "ended_early": early}
        logger().info(
            "%s closed: %s", injection.id, ", ".join(sorted({v[0] for v in verdicts.values()})) or "nothing to undo"
        )
        if injection.failure is not None:
            self._reply_active(injection, {"error": injection.failure})
        for reply in injection.on_closed:
            reply(told)
        injection.on_closed = []
        self._release_owner(injection)
        self.injections.pop(injection.id, None)
        self.records.append(injection.record)
        ledger.prune(self.records)
        _unlink(self._lock_path(injection.id))
        self._settled()

    def _append(self, injection: Injection, document: Dict[str, Any], durable: bool = False) -> None:
        """Write a line, best effort: an undo never waits for the ledger."""
        assert injection.record is not None
        try:
            injection.record.append(document, durable)
        except OSError as problem:
            injection.record.lines.append(document)
            logger().error("%s: its record cannot be written (%s)", injection.id, problem.strerror)

    # --- start

    def _recover(self) -> None:
        """Read every ledger and decide: close, keep, or undo; newest first."""
        places.remember_state(self.state_dir)
        found: List[ledger.Record] = []
        for directory in places.known_states():
            found += list(ledger.read_all(directory))
        now, wall = places.boottime(), time.time()
        for record in reversed(found):
            planned = record.lines[0]
            if record.state == "closed":
                self.answers[planned.get("request", "")] = record.id
                self.records.insert(0, record)
                continue
            injection = Injection(
                record.id, {"request": planned.get("request", ""), "run": planned.get("run", "?")}, "stuck"
            )
            injection.record = record
            self.injections[record.id] = injection
            self.answers[planned.get("request", "")] = record.id
            if record.damaged or planned.get("schema", 0) > ledger.SCHEMA or planned.get("line") != "planned":
                reason = "its first line is damaged" if record.damaged else "a newer version wrote it"
                injection.stuck = [
                    f"{record.path}: {reason}: undo it by hand, then `chaosgpu-node abandon {record.id}`"
                ]
                logger().error("%s STUCK: %s", record.id, injection.stuck[0])
                continue
            injection.untouched_from = (record.last("undoing") or {}).get("untouched_from")
            injection.deadline_boottime = planned["deadline_boottime"]
            injection.deadline_wall = planned["deadline_wall"]
            active = record.last("active")
            injection.result = active["result"] if active else {}
            same_boot = planned["boot_id"] == self.boot_id
            left = now < injection.deadline_boottime and wall < injection.deadline_wall
            if record.state == "active" and same_boot and left and "fd" not in planned["bounds"]:
                injection.state = "active"
                self._adopt_owner(injection, planned)
                continue
            if not same_boot and "disk" not in planned["bounds"]:
                self._close(
                    injection,
                    {str(i): ["lost", "the machine was restarted"] for i in range(len(planned["changes"]))},
                    {},
                )
                continue
            injection.state = "active"
            self._undo(injection, "found open when the keeper started" if left else "deadline")
        if self.injections:
            self._opened()

    def _adopt_owner(self, injection: Injection, planned: Dict[str, Any]) -> None:
        """A kept fault keeps its owner: the process that ran the experiment, if it still is that one."""
        if planned["outlive_run"]:
            return
        owner = planned.get("owner_process")
        if owner is None or start_time_ticks(owner["pid"]) != owner["start"]:
            self._undo(injection, "its owner is gone")
            return
        injection.owner_fd = os.pidfd_open(owner["pid"])
        self.selector.register(injection.owner_fd, selectors.EVENT_READ, lambda _: self._owner_gone(injection))

    # --- requests about what is there

    def _chosen(self, message: Dict[str, Any]) -> List[Injection]:
        chosen = list(self.injections.values())
        if message.get("ids"):
            wanted = set(message["ids"])
            missing = wanted - set(self.injections) - {record.id for record in self.records}
            if missing:
                raise BadArgument(f"there is no injection {', '.join(sorted(missing))} here")
            chosen = [injection for injection in chosen if injection.id in wanted]
        if message.get("run"):
            chosen = [injection for injection in chosen if injection.request["run"] == message["run"]]
        if message.get("fault"):
            chosen = [i for i in chosen if i.record is not None and i.record.planned.get("fault") == message["fault"]]
        return [injection for injection in chosen if injection.open]

    def _revert(self, connection: Connection, message: Dict[str, Any]) -> None:
        """Undo the chosen injections at once and answer when each is closed or stuck."""
        chosen = self._chosen(message)
        done: List[Dict[str, Any]] = []
        already = []
        if message.get("ids"):
            open_ids = {injection.id for injection in chosen}
            already = [self._record_summary(r) for r in self.records if r.id in message["ids"] and r.id not in open_ids]
        waiting = len(chosen)

        def one_more(told: Dict[str, Any]) -> None:
            done.append(told)
            if len(done) == waiting:
                connection.reply({"node": self.node, "reverted": [*already, *done]})

        if not chosen:
            connection.reply({"node": self.node, "reverted": already})
        for injection in chosen:
            if injection.state == "surveying":
                self._drop_hand(injection)
                self._give_up(injection, error("failed", f"{self.node}: reverted before it began"))
                one_more({"injection": injection.id, "state": "closed", "fault": injection.request.get("fault", "")})
                continue
            injection.on_closed.append(one_more)
            if injection.state == "stuck" and injection.record is not None and not injection.record.damaged:
                injection.retry_at = math.inf
                self._start_undo_hand(injection)
            elif injection.state == "stuck":
                self._mark_damaged(injection)
            else:
                self._undo(injection, message.get("cause", "reverted on request"))

    def _mark_damaged(self, injection: Injection) -> None:
        for reply in injection.on_closed:
            reply(self._summary(injection))
        injection.on_closed = []

    def _list(self, message: Dict[str, Any]) -> List[Dict[str, Any]]:
        opened = [self._summary(injection) for injection in self._chosen(message) if injection.state != "surveying"]
        if not message.get("recent"):
            return opened
        recent = [
            self._record_summary(record)
            for record in self.records[-RECENT:]
            if not message.get("run") or record.planned.get("run") == message["run"]
        ]
        return opened + recent[::-1]

    def _summary(self, injection: Injection) -> Dict[str, Any]:
        assert injection.record is not None
        told = self._record_summary(injection.record)
        told["state"] = injection.state
        if injection.state == "stuck":
            told["stuck"] = injection.stuck
        if injection.state in ("applying", "active"):
            left = min(injection.deadline_boottime - places.boottime(), injection.deadline_wall - time.time())
            told["seconds_left"] = round(max(0.0, left), 3)
        return told

    def _record_summary(self, record: ledger.Record) -> Dict[str, Any]:
        planned = record.lines[0]
        undoing, closed = record.last("undoing"), record.last("closed")
        told: Dict[str, Any] = {
            "injection": record.id,
            "run": planned.get("run", ""),
            "fault": planned.get("fault", ""),
            "node": self.node,
            "state": record.state,
            "planned_at": _iso(planned.get("at", 0)),
            "deadline": _iso(planned.get("deadline_wall", 0)),
            "undo": f"chaos gpu revert {record.id}",
        }
        if undoing:
            told["cause"] = undoing["cause"]
        if closed:
            told["closed_at"] = _iso(closed["at"])
            told["verdicts"] = closed["verdicts"]
            told["ended_early"] = closed["ended_early"]
        return told

    def _find_record(self, identity: str) -> ledger.Record:
        injection = self.injections.get(identity)
        if injection is not None and injection.record is not None:
            return injection.record
        for record in self.records:
            if record.id == identity:
                return record
        raise BadArgument(f"there is no injection {identity!r} here")

    def _verify(self, connection: Connection, message: Dict[str, Any]) -> None:
        """Ask the kernel whether anything of the chosen injections, open or closed, is still in place."""
        wanted = [
            record
            for record in [*(i.record for i in self.injections.values()), *self.records]
            if record is not None
            and record.planned.get("line") == "planned"
            and (not message.get("ids") or record.id in message["ids"])
            and (not message.get("run") or record.planned.get("run") == message["run"])
        ]
        left: List[Dict[str, Any]] = []
        waiting = {record.id for record in wanted}

        def done(record: ledger.Record, held: List[str]) -> None:
            waiting.discard(record.id)
            opened = record.id in self.injections
            if held or opened:
                left.append({**self._record_summary(record), "held": held, "open": opened})
            if not waiting:
                connection.reply({"node": self.node, "verified": len(wanted), "left": left})

        if not wanted:
            connection.reply({"node": self.node, "verified": 0, "left": []})
        for record in wanted:
            self._start_verify_hand(record, done)

    def _start_verify_hand(self, record: ledger.Record, done: Callable[[ledger.Record, List[str]], None]) -> None:
        check = Injection("verify-" + record.id, {"request": "", "run": ""}, "verifying")
        check.record = record
        answered: List[Tuple[bool, List[str]]] = []

        def hear(_: Any) -> None:
            assert check.line is not None
            for message in check.line.receive():
                if "verified" in message or "failed" in message:
                    answered.append((True, message.get("verified", [message.get("failed", {}).get("message", "?")])))
            if check.line.eof or answered:
                self._drop_hand(check)
                done(record, answered[0][1] if answered else ["could not be read: the checking process died"])

        task = {"do": "verify", "id": record.id, "lock": "", "record": record.planned}
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_hand(theirs)
            hand.run(task, theirs)
        theirs.close()
        check.pid, check.line = pid, wire.Line(ours)
        self.selector.register(ours, selectors.EVENT_READ, hear)

    def _abandon(self, connection: Connection, message: Dict[str, Any]) -> None:
        """Break glass: close a stuck record on a person's word. The reason stays in it."""
        injection = self.injections.get(message["id"])
        if injection is None or injection.record is None or injection.state != "stuck":
            raise BadArgument(f"{message['id']} is not stuck: only a stuck injection can be abandoned")
        if not str(message.get("reason", "")).strip():
            raise BadArgument("reason is missing: say why this is abandoned, it stays in the record")
        injection.stuck = []
        self._append(injection, {"line": "undoing", "at": time.time(), "cause": f"abandoned: {message['reason']}"})
        self._drop_hand(injection)
        count = len(injection.record.planned.get("changes", []))
        self._close(injection, {str(i): ["abandoned", str(message["reason"])] for i in range(count)}, {})
        connection.reply({"node": self.node, "abandoned": message["id"]})


def _one_shot_answer(reply: Reply, result: Dict[str, Any]) -> Reply:
    """A one-shot's caller is answered when its record is closed, with the proof of the deed."""
    return lambda closed: reply({**result, "state": "done", "restored": closed.get("restored", {})})


def _iso(wall: float) -> str:
    return (
        datetime.datetime.fromtimestamp(wall, datetime.timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def hold_lock() -> bool:
    """Take the machine's keeper lock: an fcntl record lock, never inherited, whose holder F_GETLK can name."""
    fd = os.open(places.lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return False
    return True  # the descriptor stays open for the life of the process: closing it would free the lock


def main(bundle: str) -> None:
    """Run as the keeper until there is nothing to keep. The caller holds the lock already."""
    places.private_dir(places.run_dir())
    places.private_dir(places.state_dir())
    path = places.socket_path()
    _unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setblocking(False)
    old = os.umask(0o177)
    listener.bind(path)
    os.umask(old)
    listener.listen(64)
    gc.collect()
    gc.freeze()
    Keeper(listener, bundle).serve()
