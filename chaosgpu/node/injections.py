"""The course of every injection on a node: survey, plan, apply, hold, undo, close; and what a fresh keeper finds.

One state machine, moved by hands' messages, by owners that end, by the clock and by requests. It writes the ledger; it
never touches the node.
"""

import datetime
import math
import os
import secrets
import selectors
import time
from typing import Any, Callable, Dict, List, Optional

from chaosgpu import __version__
from chaosgpu.changes.base import start_time_ticks
from chaosgpu.changes.errors import BadArgument, ChaosgpuError, Refused
from chaosgpu.faults.base import CATALOGUE, build, duration_seconds
from chaosgpu.node import keys, ledger, places
from chaosgpu.node.hands import Hand
from chaosgpu.node.log import logger

SURVEY_SECONDS = 30.0
APPLY_SECONDS = 120.0
UNDO_SECONDS = 20.0
WARM_UNDO_SECONDS = 5.0  # for a waiting hand's answer, before a fresh one is started
FIRST_RETRY_SECONDS = 0.1  # a hand that was killed is replaced at once; then with back-off
LONGEST_RETRY_SECONDS = 60.0

Reply = Callable[[Dict[str, Any]], None]


def error(kind: str, message: str) -> Dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


class Caller:
    """Who asked: how to answer, and the process or connection that an injection is owned by."""

    pid: int = 0

    def reply(self, message: Dict[str, Any]) -> None:
        raise NotImplementedError


class Injection:
    """One injection while it is open: its record, its hand if there is one, and who waits for it."""

    def __init__(self, identity: str, request: Dict[str, Any], state: str) -> None:
        self.id = identity
        self.request = request
        self.state = state  # surveying | applying | active | undoing | stuck | closed
        self.record: Optional[ledger.Record] = None
        self.hand: Optional[Hand] = None
        self.hand_waits = False  # the hand stays for the keeper's word (fd-bound, or failed)
        self.limit = math.inf  # boot-time instant by which the hand must have done its present step
        self.retry_at = math.inf
        self.retry_seconds = FIRST_RETRY_SECONDS
        self.deadline_boottime = math.inf
        self.deadline_wall = math.inf
        self.owner_fd: Optional[int] = None
        self.owner_caller: Optional[Caller] = None
        self.owner_process: Optional[Dict[str, int]] = None
        self.untouched_from: Optional[int] = None
        self.failure: Optional[Dict[str, Any]] = None
        self.result: Dict[str, Any] = {}
        self.stuck: List[str] = []
        self.on_active: List[Reply] = []
        self.on_closed: List[Reply] = []

    @property
    def readable(self) -> bool:
        """Whether the record says what was planned; without that only a person can undo it."""
        return self.record is not None and "changes" in self.record.planned


class Injections:
    """All injections of this node. ``opened`` and ``settled`` are told what there is to guard."""

    def __init__(
        self, selector: selectors.BaseSelector, supervisor: str, opened: Callable[[], None], settled: Callable[[], None]
    ) -> None:
        self.selector = selector
        self.supervisor = supervisor
        self.opened, self.settled = opened, settled
        self.state_dir = places.state_dir()
        self.boot_id = places.boot_id()
        self.node = os.uname().nodename
        self.house: List[int] = [os.getpid()]  # keeper and standby
        self.leaving = False
        self.open: Dict[str, Injection] = {}
        self.records: List[ledger.Record] = []  # closed ones, oldest first
        self.answers: Dict[str, str] = {}  # request id -> injection id

    # --- the clock

    def next_instant(self) -> float:
        """The boot-time instant at which ``tick`` has something to do; infinite when nothing is open."""
        now, wall = places.boottime(), time.time()
        instants = [math.inf]
        for injection in self.open.values():
            instants += [injection.limit, injection.retry_at]
            if injection.state in ("applying", "active"):
                instants += [injection.deadline_boottime, injection.deadline_wall - wall + now]
        return min(instants)

    def tick(self) -> None:
        """Do what is due: deadlines by either clock, hands that are overdue, undos to try again."""
        now, wall = places.boottime(), time.time()
        for injection in list(self.open.values()):
            if injection.state in ("applying", "active"):
                if self.leaving:
                    self.undo(injection, "the keeper was told to stop (SIGTERM)")
                elif now >= injection.deadline_boottime or wall >= injection.deadline_wall:
                    self.undo(injection, "deadline")
            if self.leaving and injection.state == "surveying":
                self.cancel(injection, "the keeper was told to stop (SIGTERM)")
            if now >= injection.limit:
                self._overdue(injection)
            if now >= injection.retry_at:
                injection.retry_at = math.inf
                self.start_undo_hand(injection)

    def cancel(self, injection: "Injection", why: str) -> None:
        """End an injection that is still being surveyed: nothing was touched."""
        self._drop_hand(injection)
        self._give_up(injection, error("failed", f"{self.node}: {why}"))

    # --- inject

    def inject(self, caller: Caller, message: Dict[str, Any]) -> None:
        _check_shape(message)
        known = self.answers.get(message["request"])
        if known is not None:
            self._repeat(caller, known)
            return
        if self.leaving:
            raise ChaosgpuError("the keeper is leaving: try again in a second")
        if message["fault"] not in CATALOGUE:
            raise BadArgument(f"there is no fault {message['fault']!r} in this node's version {__version__}")
        fault = build(message["fault"], message["arguments"])
        seconds = duration_seconds(message["duration_seconds"], message["allow"])
        self._check_supervised(fault.declaration.danger, message["allow"], "danger: hardware")
        others = {other.request["run"] for other in self.open.values() if other.record is not None}
        others -= {message["run"]}
        if others and "concurrent" not in message["allow"]:
            raise Refused(
                [
                    f"run {sorted(others)[0]} has a fault open on this node:"
                    " wait, revert it, or allow: ['concurrent'] to run two experiments here at once"
                ]
            )
        injection = Injection(secrets.token_hex(5), message, "surveying")
        injection.on_active.append(caller.reply)
        if not message["dry_run"]:
            self.answers[message["request"]] = injection.id
            self._take_owner(injection, caller)
        self.open[injection.id] = injection
        self.opened()
        self._start_hand(
            injection,
            {
                "do": "inject",
                "fault": message["fault"],
                "arguments": message["arguments"],
                "allow": message["allow"],
                "house_pids": sorted({*self.house, *places.ancestors(caller.pid)}),
                "duration_seconds": seconds,
            },
            SURVEY_SECONDS,
        )

    def _check_supervised(self, danger: str, allow: List[str], why: str) -> None:
        if danger == "hardware" and "hardware" not in allow:
            raise Refused(["this fault can leave hardware needing a person: say allow: ['hardware'] to go on"])
        if danger == "hardware" and self.supervisor == "standby" and "unsupervised" not in allow:
            raise Refused(
                [f"only a standby process guards this node ({why}): run it under systemd, or allow: ['unsupervised']"]
            )

    def _take_owner(self, injection: Injection, caller: Caller) -> None:
        """The injection lives no longer than its owner, unless ``outlive_run``: a process here, or a caller."""
        if injection.request["outlive_run"]:
            return
        injection.owner_caller = caller
        if injection.request["owner"] == "peer" and caller.pid:
            start = start_time_ticks(caller.pid)
            if start is not None:  # else it ended already, and its connection will say so
                self._watch_owner(injection, {"pid": caller.pid, "start": start})

    def _watch_owner(self, injection: Injection, process: Dict[str, int]) -> None:
        injection.owner_process = process
        try:
            injection.owner_fd = os.pidfd_open(process["pid"])
        except OSError:
            return  # it ended in between, and its connection will say so
        self.selector.register(injection.owner_fd, selectors.EVENT_READ, lambda _: self.owner_gone(injection))

    def caller_gone(self, caller: Caller) -> None:
        """A connection was closed: whatever it owns ends."""
        for injection in list(self.open.values()):
            if injection.owner_caller is caller:
                self.owner_gone(injection)

    def owner_gone(self, injection: Injection) -> None:
        self._release_owner(injection)
        if injection.state == "surveying":
            self.cancel(injection, "the caller went away")
        elif injection.state in ("applying", "active"):
            self.undo(injection, "its owner is gone")

    def _release_owner(self, injection: Injection) -> None:
        injection.owner_caller = None
        if injection.owner_fd is not None:
            self.selector.unregister(injection.owner_fd)
            os.close(injection.owner_fd)
            injection.owner_fd = None

    def _repeat(self, caller: Caller, identity: str) -> None:
        """A repeated request id gets the recorded answer, never a second fault."""
        injection = self.open.get(identity)
        if injection is not None and injection.state in ("surveying", "applying"):
            injection.on_active.append(caller.reply)
            return
        record = self.find_record(identity)
        active = record.last("active")
        if active:
            state = injection.state if injection is not None else record.state
            caller.reply({**active["result"], "state": state})
        else:
            verdicts = (record.last("closed") or {}).get("verdicts", {})  # the machine's restart undoes without a line
            details = sorted({detail for _, detail in verdicts.values() if detail})
            cause = (record.last("undoing") or {}).get("cause") or "; ".join(details) or "unknown cause"
            answer = error("failed", f"{self.node}: it was undone before it was in place: {cause}")
            if injection is None:
                caller.reply(answer)
            else:
                injection.on_closed.append(lambda _: caller.reply(answer))

    def _planned(self, injection: Injection, plan: Dict[str, Any]) -> None:
        request = injection.request
        try:
            self._check_keys(injection, plan)
            if "disk" in plan["bounds"]:
                self._check_supervised("hardware", [*request["allow"], "hardware"], "the change survives a reboot")
                if places.in_memory(self.state_dir):
                    raise Refused(
                        [
                            f"the change survives a reboot and the ledger in {self.state_dir} does not:"
                            " set CHAOSGPU_STATE to a directory on a disk and start the keeper anew"
                        ]
                    )
            if request["dry_run"]:
                told = {"node": self.node, "fault": request["fault"], "supervisor": self.supervisor, **plan}
                self._drop_hand(injection)
                self._give_up(injection, {"dry_run": True, **told})
                return
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
        assert injection.hand is not None
        injection.hand.say({"do": "go", "deadline_boottime": injection.deadline_boottime})
        logger().info("%s %s planned, %d changes", injection.id, request["fault"], len(plan["changes"]))

    def _check_keys(self, injection: Injection, plan: Dict[str, Any]) -> None:
        """No two faults on one object, and none on what another's undo needs."""
        for other in self.open.values():
            if other is injection or other.record is None or not other.readable:
                continue
            theirs = other.record.planned
            clash = keys.first_conflict(plan["keys"], [*theirs["keys"], *theirs["needs"]])
            clash = clash or keys.first_conflict(plan["needs"], theirs["keys"])
            if clash:
                raise Refused([f"{clash[0]} is held by injection {other.id} ({theirs['fault']}): revert it first"])

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
        self.append(injection, {"line": "active", "at": time.time(), "result": result}, "disk" in planned["bounds"])
        logger().info("%s %s active until %s", injection.id, planned["fault"], result["deadline"])
        injection.hand_waits = "fd" in planned["bounds"]
        if CATALOGUE[planned["fault"]].declaration.reversible == "one-shot":
            for reply in injection.on_active:
                injection.on_closed.append(_one_shot_answer(reply, result))
            injection.on_active = []
            self.undo(injection, "one-shot: nothing stays in place")
        else:
            self._reply_active(injection, result)
            # From here on only the owner's process counts; a caller may close its caller.
            if injection.owner_fd is not None:
                injection.owner_caller = None

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
        self.open.pop(injection.id, None)
        if injection.record is None:
            self.answers.pop(injection.request["request"], None)
            _unlink(self._lock_path(injection))
        self.settled()

    # --- hands

    def _start_hand(self, injection: Injection, task: Dict[str, Any], limit_seconds: float) -> None:
        lock = "" if injection.request.get("dry_run") else self._lock_path(injection)
        task = {"id": injection.id, "lock": lock, "state_dir": self.state_dir, **task}
        try:
            injection.hand = Hand(
                task,
                self.selector,
                lambda message: self._hand_says(injection, message),
                lambda: self._hand_gone(injection),
            )
        except OSError as problem:
            self._no_hand(injection, f"no process can be started ({problem.strerror})")
            return
        injection.limit = places.boottime() + limit_seconds
        injection.hand_waits = False

    def _drop_hand(self, injection: Injection) -> None:
        if injection.hand is not None:
            injection.hand.drop()
            injection.hand = None
        injection.hand_waits = False
        injection.limit = math.inf

    def _lock_path(self, injection: Injection) -> str:
        """Beside its record, which a keeper with another state directory may have written."""
        directory = os.path.dirname(injection.record.path) if injection.record is not None else self.state_dir
        return os.path.join(directory, injection.id + ".lock")

    def _no_hand(self, injection: Injection, why: str) -> None:
        if injection.record is None:
            self._give_up(injection, error("failed", f"{self.node}: {why}"))
        else:
            self.mark_stuck(injection, [why])

    def _hand_says(self, injection: Injection, message: Dict[str, Any]) -> None:
        if "surveyed" in message:
            self._planned(injection, message["surveyed"])
        elif "applied" in message:
            durable = injection.record is not None and "disk" in injection.record.planned["bounds"]
            self.append(
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
        injection.untouched_from = message["untouched_from"]
        if injection.state == "undoing":
            self._drop_hand(injection)
            self.mark_stuck(injection, [failure["message"]])
            return
        if injection.state == "applying":
            injection.failure = failure
        injection.hand_waits = failure["kind"] != "internal"
        self.undo(injection, failure["message"])

    def _hand_gone(self, injection: Injection) -> None:
        self._drop_hand(injection)
        if injection.state == "surveying":
            self._give_up(injection, error("failed", f"{self.node}: the survey ended without an answer (killed?)"))
        elif injection.state == "applying":
            injection.failure = {"kind": "failed", "message": f"{self.node}: the hand died while it applied the fault"}
            self.undo(injection, "the hand died while it applied the fault")
        elif (
            injection.state == "active" and injection.record is not None and "fd" in injection.record.planned["bounds"]
        ):
            self.undo(injection, "the hand that held the fault died")
        elif injection.state == "undoing":
            self.mark_stuck(injection, ["the hand died while it undid the fault"])

    def _overdue(self, injection: Injection) -> None:
        injection.limit = math.inf
        if injection.state == "surveying":
            self._drop_hand(injection)
            self._give_up(injection, error("failed", f"{self.node}: the survey took longer than {SURVEY_SECONDS:g} s"))
        elif injection.state == "applying":
            injection.failure = {"kind": "failed", "message": f"{self.node}: not in place after {APPLY_SECONDS:g} s"}
            self.undo(injection, "it took too long to apply")
        elif injection.state == "undoing" and injection.hand_waits:
            self.start_undo_hand(injection)
        elif injection.state == "undoing":
            self._drop_hand(injection)
            self.mark_stuck(injection, [f"the undo took longer than {UNDO_SECONDS:g} s"])

    # --- undo

    def undo(self, injection: Injection, cause: str) -> None:
        assert injection.record is not None
        if injection.state not in ("applying", "active"):
            return
        waits = injection.hand_waits and injection.hand is not None
        injection.state = "undoing"
        if injection.failure is None and not injection.result:
            injection.failure = {"kind": "failed", "message": f"{self.node}: undone before it was in place: {cause}"}
        self.append(
            injection,
            {"line": "undoing", "at": time.time(), "cause": cause, "untouched_from": injection.untouched_from},
        )
        logger().info("%s undoing: %s", injection.id, cause)
        if waits:
            assert injection.hand is not None
            injection.limit = places.boottime() + WARM_UNDO_SECONDS
            injection.hand.say({"do": "undo"})
        else:
            self.start_undo_hand(injection)

    def start_undo_hand(self, injection: Injection) -> None:
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
            self.mark_stuck(injection, message["stuck"])
            return
        self.close(injection, message["undone"], message["restored"])

    def mark_stuck(self, injection: Injection, why: List[str]) -> None:
        """Not undone: say so, loudly, and try again with back-off until it is."""
        injection.state = "stuck"
        injection.stuck = why
        injection.limit = math.inf
        if injection.readable:
            injection.retry_at = places.boottime() + injection.retry_seconds
            injection.retry_seconds = min(injection.retry_seconds * 2, LONGEST_RETRY_SECONDS)
        logger().error("%s STUCK: %s", injection.id, "; ".join(why))
        for reply in injection.on_closed:
            reply(self.summary(injection))
        failure = injection.failure or {"kind": "failed", "message": f"{self.node}: {why[0]}"}
        self._reply_active(injection, {"error": {**failure, "stuck": why, "injection": injection.id}})
        injection.on_closed = []

    def close(self, injection: Injection, verdicts: Dict[str, Any], restored: Dict[str, Any]) -> None:
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
        self.append(injection, closed, "disk" in planned.get("bounds", []))
        injection.record.settle()
        injection.state = "closed"
        told = {**self.summary(injection), "verdicts": closed["verdicts"], "restored": restored, "ended_early": early}
        logger().info(
            "%s closed: %s", injection.id, ", ".join(sorted({v[0] for v in verdicts.values()})) or "nothing to undo"
        )
        if injection.failure is not None:
            self._reply_active(injection, {"error": {**injection.failure, "injection": injection.id}})
        for reply in injection.on_closed:
            reply(told)
        injection.on_closed = []
        self._release_owner(injection)
        self.open.pop(injection.id, None)
        self.records.append(injection.record)
        for dropped in ledger.prune(self.records):
            self.answers.pop(dropped.planned.get("request", ""), None)
        _unlink(self._lock_path(injection))
        self.settled()

    def append(self, injection: Injection, document: Dict[str, Any], durable: bool = False) -> None:
        """Write a line, best effort: an undo never waits for the ledger."""
        assert injection.record is not None
        try:
            injection.record.append(document, durable)
        except OSError as problem:
            injection.record.lines.append(document)
            logger().error("%s: its record cannot be written (%s)", injection.id, problem.strerror)

    # --- start

    def recover(self) -> None:
        """Read every ledger and decide: close, keep, or undo; newest first."""
        places.remember_state(self.state_dir)
        found: List[ledger.Record] = []
        for directory in places.known_states():
            for path in ledger.drop_empty(directory):
                logger().warning("%s had no whole first line, so its fault had not begun: deleted", path)
            found += ledger.read_all(directory)
        now, wall = places.boottime(), time.time()
        for record in reversed(found):
            planned = record.lines[0]
            if record.state == "closed":
                self.answers[planned.get("request", "")] = record.id
                self.records.insert(0, record)
                continue
            request = {name: planned.get(name, "") for name in ("request", "run", "fault")}
            injection = Injection(record.id, request, "stuck")
            injection.record = record
            self.open[record.id] = injection
            self.answers[planned.get("request", "")] = record.id
            if record.damaged or planned.get("schema", 0) > ledger.SCHEMA or planned.get("line") != "planned":
                reason = "its first line is damaged" if record.damaged else "a newer version wrote it"
                injection.stuck = [
                    f"{record.path}: {reason}: undo it by hand, then `chaosgpu-node abandon {record.id} --reason TEXT`"
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
                self.close(
                    injection,
                    {str(i): ["lost", "the machine was restarted"] for i in range(len(planned["changes"]))},
                    {},
                )
                continue
            injection.state = "active"
            self.undo(injection, "found open when the keeper started" if left else "deadline")
        if self.open:
            self.opened()

    def _adopt_owner(self, injection: Injection, planned: Dict[str, Any]) -> None:
        """A kept fault keeps its owner: the process that ran the experiment, if it still is that one."""
        if planned["outlive_run"]:
            return
        owner = planned.get("owner_process")
        if owner is None or start_time_ticks(owner["pid"]) != owner["start"]:
            self.undo(injection, "its owner is gone")
            return
        self._watch_owner(injection, owner)
        if injection.owner_fd is None:
            self.undo(injection, "its owner is gone")

    # --- telling

    def summary(self, injection: Injection) -> Dict[str, Any]:
        assert injection.record is not None
        told = self.record_summary(injection.record)
        told["state"] = injection.state
        if injection.state == "stuck":
            told["stuck"] = injection.stuck
        if injection.state in ("applying", "active"):
            left = min(injection.deadline_boottime - places.boottime(), injection.deadline_wall - time.time())
            told["seconds_left"] = round(max(0.0, left), 3)
        return told

    def record_summary(self, record: ledger.Record) -> Dict[str, Any]:
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

    def find_record(self, identity: str) -> ledger.Record:
        injection = self.open.get(identity)
        if injection is not None and injection.record is not None:
            return injection.record
        for record in self.records:
            if record.id == identity:
                return record
        raise BadArgument(f"there is no injection {identity!r} here")


def _check_shape(message: Dict[str, Any]) -> None:
    """Refuse a request that would be misread later, when something is in place already."""
    texts = ("request", "run", "fault", "owner")
    wrong = [name for name in texts if not isinstance(message.get(name), str)]
    wrong += [name for name in ("dry_run", "outlive_run") if not isinstance(message.get(name), bool)]
    allow = message.get("allow")
    if not isinstance(allow, list) or not all(isinstance(word, str) for word in allow):
        wrong.append("allow")
    if not isinstance(message.get("arguments"), dict):
        wrong.append("arguments")
    if wrong:
        raise BadArgument(f"malformed request: {', '.join(wrong)}")


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
