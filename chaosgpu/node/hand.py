"""The hand: the one process of an injection that touches the node. It surveys, applies, proves and undoes.

It is forked by the keeper with everything imported, tells the keeper each step over a socket pair, and waits for its
word only where a step must be durable first. When the keeper is gone (EOF) it undoes by itself what it still can.
"""

import os
import select
import shlex
import signal
import socket
from typing import Any, Dict, List, NoReturn, Optional

from chaosgpu.changes import base
from chaosgpu.changes.base import Change
from chaosgpu.changes.errors import ChaosgpuError, Moved, Refused
from chaosgpu.changes.grip import Grip
from chaosgpu.faults.base import CATALOGUE, Fault, House, Survey, arguments_of, build
from chaosgpu.node import limbs, places, wire

LEEWAY_SECONDS = 0.5  # how long past the deadline a hand waits for its keeper before it undoes alone


def run(task: Dict[str, Any], sock: socket.socket) -> NoReturn:
    """The life of a forked hand. Never returns; the exit status carries nothing, the messages do."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _Hand(task, sock).work()
    except BaseException as error:  # a hand must not unwind into the keeper's code
        _report_bug(sock, error)
    finally:
        os._exit(0)


def _report_bug(sock: socket.socket, error: BaseException) -> None:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else "?"
    try:
        message = " ".join(f"internal error, please report: {type(error).__name__} at {where}: {error}".split())
        sock.sendall(wire.encode({"failed": {"kind": "internal", "message": message[:500]}, "untouched_from": None}))
    except (OSError, ValueError):
        pass


class _KeeperGone(Exception):
    """EOF or a broken pipe from the keeper: from here on the hand is alone."""


class _Hand:
    def __init__(self, task: Dict[str, Any], sock: socket.socket) -> None:
        self.task = task
        self.sock = sock
        self.lock_path: str = task["lock"]
        self.lock_fd = limbs.open_lock(self.lock_path) if self.lock_path else None
        self.grip = Grip(task["id"], self.lock_fd)
        self.changes: List[Change] = []
        self.observed: Dict[int, Any] = {}
        self.proof: Dict[str, Any] = {}
        self.touched = 0  # changes that may have been made: the undo covers these and no others

    def work(self) -> None:
        what = self.task["do"]
        if what == "inject":
            self._inject()
        elif what == "undo":
            self._undo_from_record()
        elif what == "verify":
            self._verify()

    # --- towards the keeper

    def tell(self, message: Dict[str, Any]) -> None:
        try:
            self.sock.settimeout(None)
            self.sock.sendall(wire.encode(message))
        except OSError:
            raise _KeeperGone from None

    def hear(self, seconds: Optional[float]) -> Dict[str, Any]:
        try:
            return wire.wait_for_message(self.sock, seconds)
        except socket.timeout:
            return {}
        except (ChaosgpuError, OSError):
            raise _KeeperGone from None

    # --- inject

    def _inject(self) -> None:
        fault = build(self.task["fault"], self.task["arguments"])
        survey = Survey(
            injection=self.task["id"],
            house=House(self.task["state_dir"], (*self.task["house_pids"], os.getpid()), places.system_python()),
            grip=self.grip,
            allow=frozenset(self.task["allow"]),
        )
        if self.lock_fd is not None:
            if not limbs.try_lock(self.lock_fd):
                return
            limbs.sign(self.lock_fd)
        try:
            fault.survey(survey)
            if survey.refusals:
                raise Refused(survey.refusals)
            self.changes = fault.changes(survey)
        except ChaosgpuError as error:
            self.tell(_failure(error, 0))
            return
        plan = _plan(fault, survey, self.changes, self.lock_path)
        if not self.lock_path:
            plan["would_change"] = [_explained(change, self.lock_path, wanted=True) for change in self.changes]
        self.tell({"surveyed": plan})
        word = self.hear(None)
        if word.get("do") != "go":
            return
        self.task["deadline_boottime"] = word["deadline_boottime"]
        try:
            failure = self._apply_and_prove(fault, survey.facts)
            self.tell(
                failure or {"active": self.proof, "changed": _changed(self.changes, self.observed, self.lock_path)}
            )
            self._stay(fault, survey.facts, failed=failure is not None)
        except _KeeperGone:
            self._undo_alone()

    def _apply_and_prove(self, fault: Fault, facts: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        for index, change in enumerate(self.changes):
            self.touched = index + 1
            try:
                self.observed[index] = change.apply(self.grip)
            except Moved as error:
                self.touched = index
                return _failure(error, self.touched)
            except ChaosgpuError as error:
                return _failure(error, self.touched)
            self.tell({"applied": index, "observed": self.observed[index]})
        try:
            self.proof = fault.evidence(facts, self.changes, self.grip)
        except ChaosgpuError as error:
            return _failure(error, self.touched)
        return None

    def _stay(self, fault: Fault, facts: Dict[str, Any], failed: bool) -> None:
        """Hold what ends with this process until the keeper's word, EOF, or the deadline."""
        if not failed and all(change.bound != base.FD for change in self.changes):
            return
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a child or a traced thread wants us: the pipe wakes the select
        watched: List[Any] = [self.sock, wake_read]
        told = failed
        while True:
            try:
                self.grip.tend()
            except ChaosgpuError as error:
                if not told:
                    self.tell(_failure(error, self.touched))
                told = True
            left = self.task["deadline_boottime"] + LEEWAY_SECONDS - places.boottime()
            readable, _, _ = select.select(watched, [], [], max(0.0, left))
            if self.sock in readable:
                break
            if not readable:
                raise _KeeperGone
            os.read(wake_read, 4096)
        if self.hear(None).get("do") == "undo":
            self._undo(fault, facts)

    # --- undo

    def _undo_from_record(self) -> None:
        assert self.lock_fd is not None
        free = limbs.barrier(self.lock_path, self.lock_fd)
        if free:
            limbs.sign(self.lock_fd)
        record = self.task["record"]
        self.changes = [base.from_json(document) for document in record["changes"]]
        self.observed = {int(index): value for index, value in self.task["observed"].items()}
        untouched_from = self.task["untouched_from"]
        self.touched = len(self.changes) if untouched_from is None else untouched_from
        fault = _revive(record)
        self._undo(fault, record["facts"], free)

    def _undo(self, fault: Optional[Fault], facts: Dict[str, Any], barrier_free: bool = True) -> None:
        verdicts = self._take_back()
        stuck = [detail for verdict, detail in verdicts.values() if verdict == "stuck"]
        if not barrier_free:
            stuck.append(
                "a process of this injection does not end (uninterruptible): what it does later is checked again"
            )
        proof: Dict[str, Any] = {}
        if fault is not None and not stuck:
            try:
                proof = fault.restored(facts, self.changes, self.grip)
            except ChaosgpuError as error:
                stuck.append(str(error))
        self.tell({"undone": verdicts, "stuck": stuck, "restored": proof})

    def _take_back(self) -> Dict[int, List[str]]:
        verdicts: Dict[int, List[str]] = {}
        for index in reversed(range(self.touched)):
            change = self.changes[index]
            try:
                undone = change.undo(self.observed.get(index), self.grip)
                if undone.verdict in (base.RESTORED, base.REMOVED) and change.holds(self.grip):
                    undone = base.Undone(
                        "stuck", f"{change.describe().undo}: undone without an error, yet it still holds"
                    )
            except ChaosgpuError as error:
                undone = base.Undone("stuck", str(error))
            except OSError as error:
                undone = base.Undone("stuck", f"{change.describe().undo}: {error}")
            verdicts[index] = list(undone)
        return verdicts

    def _undo_alone(self) -> None:
        """The keeper is gone: take back everything once, and leave the record to whoever comes next."""
        self._take_back()
        self.grip.close()

    # --- verify

    def _verify(self) -> None:
        self.tell({"verified": {identity: self._held(changes) for identity, changes in self.task["changes"].items()}})

    def _held(self, changes: List[Dict[str, Any]]) -> List[str]:
        held = []
        for document in changes:
            try:
                change = base.from_json(document)
                if change.holds(self.grip):
                    held.append(change.describe().apply)
            except (ChaosgpuError, OSError) as error:
                held.append(f"{document.get('kind')} (cannot be read: {error})")
        return held


def _revive(record: Dict[str, Any]) -> Optional[Fault]:
    """The fault of a record, for its proof of restoration; None when this version cannot build it. No undo needs it."""
    try:
        return CATALOGUE[record["fault"]](**record["arguments"])
    except (KeyError, TypeError):
        return None


def _failure(error: ChaosgpuError, untouched_from: int) -> Dict[str, Any]:
    failed: Dict[str, Any] = {"kind": error.kind, "message": str(error)}
    if isinstance(error, Refused):
        failed["reasons"] = error.reasons
    return {"failed": failed, "untouched_from": untouched_from}


def _plan(fault: Fault, survey: Survey, changes: List[Change], lock: str) -> Dict[str, Any]:
    return {
        "arguments": arguments_of(fault),
        "facts": survey.facts,
        "warnings": survey.warnings,
        "changes": [change.to_json() for change in changes],
        "shell": [list(_by_hand(change, lock)) for change in changes],
        "keys": sorted({key for change in changes for key in change.keys()}),
        "needs": sorted({key for change in changes for key in change.needs()}),
        "bounds": sorted({change.bound for change in changes}),
    }


def _by_hand(change: Change, lock: str) -> base.Described:
    """The lines for an operator. What ends with its hand is undone by ending the hand, while it holds its lock."""
    described = change.describe()
    if change.bound != base.FD or not lock:
        return described
    file = shlex.quote(lock)
    return base.Described(described.apply, f"[ ! -e {file} ] || flock -n {file} true || kill -KILL $(cat {file})")


def _changed(changes: List[Change], observed: Dict[int, Any], lock: str) -> List[Dict[str, Any]]:
    return [_explained(change, lock, observed.get(index)) for index, change in enumerate(changes)]


def _explained(change: Change, lock: str, observed: Any = None, wanted: bool = False) -> Dict[str, Any]:
    """A change for people: what, from what to what, how long it can last, and the lines by hand.

    ``observed`` is what was read back after it; a dry run, which only wants it, has none.
    """
    entry: Dict[str, Any] = {"change": change.kind, "bound": change.bound, "what": change.name()}
    values = change.values()
    if values is not None:
        entry["from"], entry["to"] = values
    if not wanted:
        entry["observed"] = observed
    described = _by_hand(change, lock)
    return {**entry, "by_hand": described.apply, "undo_by_hand": described.undo}
