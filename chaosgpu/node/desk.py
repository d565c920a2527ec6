"""Requests about injections that are there: list, record, revert, verify, abandon."""

import time
from typing import Any, Callable, Dict, List

from chaosgpu.changes.errors import BadArgument
from chaosgpu.node import ledger
from chaosgpu.node.hands import Hand
from chaosgpu.node.injections import Injection, Injections, Reply

RECENT = 50


def _chosen(injections: Injections, message: Dict[str, Any]) -> List[Injection]:
    """The open injections that a request means: by ``ids``, ``run``, ``fault``, or all."""
    wanted = set(message.get("ids") or [])
    missing = wanted - set(injections.open) - {record.id for record in injections.records}
    if missing:
        raise BadArgument(f"there is no injection {', '.join(sorted(missing))} here")
    return [
        injection
        for injection in injections.open.values()
        if (not wanted or injection.id in wanted)
        and (not message.get("run") or injection.request["run"] == message["run"])
        and (not message.get("fault") or injection.request["fault"] == message["fault"])
    ]


def list_faults(injections: Injections, message: Dict[str, Any], reply: Reply) -> None:
    """Open faults, oldest first, then with ``recent`` the closed ones, newest first."""
    told = [injections.summary(i) for i in _chosen(injections, message) if i.record is not None]
    if message.get("recent"):
        recent = [r for r in injections.records if not message.get("run") or r.planned.get("run") == message["run"]]
        told += [injections.record_summary(record) for record in reversed(recent[-RECENT:])]
    reply({"node": injections.node, "supervisor": injections.supervisor, "faults": told})


def show_record(injections: Injections, message: Dict[str, Any], reply: Reply) -> None:
    """Every line of one record."""
    reply({"record": injections.find_record(message["id"]).lines})


def revert(injections: Injections, message: Dict[str, Any], reply: Reply) -> None:
    """Undo the chosen injections at once; answered when each is closed or stuck."""
    chosen = _chosen(injections, message)
    named = set(message.get("ids") or []) - {injection.id for injection in chosen}
    done: List[Dict[str, Any]] = [injections.record_summary(r) for r in injections.records if r.id in named]
    expected = len(done) + len(chosen)

    def one_more(told: Dict[str, Any]) -> None:
        done.append(told)
        if len(done) == expected:
            reply({"node": injections.node, "reverted": done})

    if not chosen:
        reply({"node": injections.node, "reverted": done})
    for injection in chosen:
        if injection.record is None:
            told = {"injection": injection.id, "fault": injection.request["fault"], "node": injections.node}
            injections.cancel(injection, "reverted before anything was touched")
            one_more({**told, "state": "closed", "cause": "reverted before anything was touched"})
            continue
        injection.on_closed.append(one_more)
        if injection.state != "stuck":
            injections.undo(injection, message.get("cause", "reverted on request"))
        elif injection.readable:
            injections.start_undo_hand(injection)
        else:
            injections.mark_stuck(injection, injection.stuck)


def verify(injections: Injections, message: Dict[str, Any], reply: Reply) -> None:
    """Ask the kernel whether anything of the chosen injections, open or closed, is still in place.

    Answers ``{"verified": count, "left": [...]}``, where ``left`` names each injection that is open or still holds.
    What a verdict gave up on (superseded, lost, abandoned) is not looked at again: it is not ours any more.
    """
    opened = [injection.record for injection in injections.open.values() if injection.record and injection.readable]
    wanted = {
        record.id: record
        for record in [*opened, *injections.records]
        if (not message.get("ids") or record.id in message["ids"])
        and (not message.get("run") or record.planned.get("run") == message["run"])
    }
    told: List[Dict[str, Any]] = []

    def answer() -> None:
        held = told[0]["verified"] if told and "verified" in told[0] else {}
        unread = [] if "verified" in (told or [{}])[0] else ["could not be read: the checking process failed"]
        left = [
            {**injections.record_summary(record), "held": held.get(record.id, unread), "open": name in injections.open}
            for name, record in wanted.items()
            if held.get(name, unread) or name in injections.open
        ]
        reply({"node": injections.node, "verified": len(wanted), "left": left})

    looks = {record.id: _ours(record) for record in wanted.values()}
    task = {"do": "verify", "id": "verify", "lock": "", "state_dir": injections.state_dir, "changes": looks}
    try:
        Hand(task, injections.selector, told.append, answer)
    except OSError:
        answer()


def _ours(record: ledger.Record) -> List[Dict[str, Any]]:
    """The changes of a record that must not hold any more once it is closed."""
    verdicts = (record.last("closed") or {}).get("verdicts", {})
    given_up = {index for index, (verdict, _) in verdicts.items() if verdict in ("superseded", "lost", "abandoned")}
    return [change for index, change in enumerate(record.planned["changes"]) if str(index) not in given_up]


def abandon(injections: Injections, message: Dict[str, Any], reply: Reply) -> None:
    """Break glass: close a stuck record on a person's word. The reason stays in it."""
    injection = injections.open.get(message["id"])
    if injection is None or injection.record is None or injection.state != "stuck":
        raise BadArgument(f"{message['id']} is not stuck: only a stuck injection can be abandoned")
    reason = " ".join(str(message.get("reason", "")).split())
    if not reason:
        raise BadArgument("reason is missing: say why this is abandoned, it stays in the record")
    injections.append(injection, {"line": "undoing", "at": time.time(), "cause": f"abandoned: {reason}"})
    count = len(injection.record.planned.get("changes", []))
    injections.close(injection, {str(index): ["abandoned", reason] for index in range(count)}, {})
    reply({"node": injections.node, "abandoned": message["id"]})


REQUESTS: Dict[str, Callable[[Injections, Dict[str, Any], Reply], None]] = {
    "list": list_faults,
    "record": show_record,
    "revert": revert,
    "verify": verify,
    "abandon": abandon,
}
