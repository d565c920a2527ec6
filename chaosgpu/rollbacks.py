"""What an experiment takes back. Use these as actions in ``rollbacks``, or in the method to end a fault early.

Nothing depends on them: a fault ends by itself at its deadline, and when the experiment's process is gone.
"""

from typing import Any, Dict, List, Optional

from chaoslib.exceptions import ActivityFailed
from chaoslib.types import Configuration, Secrets

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.fleet import ask, runs
from chaosgpu.fleet.inject import fail

__all__ = ["revert", "revert_all", "verify_restored"]


def revert(
    injection: str = None,
    fault: str = None,
    nodes: List[str] = None,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Undo the faults of this run now: one ``injection`` by id, those of one ``fault`` (storage.throttle_io), or all.

    Safe when nothing was injected: then no keeper is started. The output is ``{"reverted": [...], "ended_before":
    [...]}``: what was undone now, and what of this run had ended before (by its deadline, or at once as a one-shot).
    Each tells its cause and a verdict for each change: restored, removed, already, superseded (someone else
    changed it since: left alone) or lost (it is another object now); ``ended_early`` is true where the effect did not
    last as long as the fault. A keeper that does not answer is replaced first. Fails, naming it, when one is stuck.
    """
    try:
        ask.check_nodes(nodes)
        named = ask.check_identity("injection", injection)
        kind = ask.check_fault(fault)
        if named is not None:
            return {"reverted": _checked(ask.revert([named], fault=kind)), "ended_before": []}
        reverted = _checked(ask.revert(run=runs.this_run(), fault=kind))
        return {"reverted": reverted, "ended_before": _ended_before(reverted, kind)}
    except ChaosgpuError as error:
        fail(error)


def revert_all(nodes: List[str] = None, configuration: Configuration = None, secrets: Secrets = None) -> Dict[str, Any]:
    """Undo every fault of the node now, whichever run it is of. Safe when there is none. Output as for revert."""
    try:
        ask.check_nodes(nodes)
        reverted = _checked(ask.revert())
        return {"reverted": reverted, "ended_before": _ended_before(reverted, None)}
    except ChaosgpuError as error:
        fail(error)


def verify_restored(
    nodes: List[str] = None, configuration: Configuration = None, secrets: Secrets = None
) -> Dict[str, Any]:
    """Fail, naming it, while anything of this run is open or stuck, or the kernel shows a change of it in place.

    The output is ``{"verified": number of injections looked at, "left": []}``. Where nothing was injected that number
    is 0, and no keeper is started.
    """
    try:
        ask.check_nodes(nodes)
        answer = ask.verify(runs.this_run(), start=_sent())
    except ChaosgpuError as error:
        fail(error)
    if answer["left"]:
        named = "; ".join(
            f"{left['injection']} {left['fault']} on {left['node']} ({left['state']}"
            f"{': ' + ', '.join(left['held']) if left['held'] else ''})"
            for left in answer["left"]
        )
        raise ActivityFailed(f"still in place: {named}")
    return {"verified": answer["verified"], "left": []}


def _sent() -> bool:
    """Whether this run has sent a fault to a node: then its records are there to be read."""
    return bool(runs.recall(runs.this_run()))


def _ended_before(reverted: List[Dict[str, Any]], fault: Optional[str]) -> List[Dict[str, Any]]:
    """What of this run was closed already, newest first."""
    if not _sent():
        return []
    now = {entry["injection"] for entry in reverted}
    recent = ask.faults(runs.this_run(), recent=True)
    return [
        entry
        for entry in recent
        if entry["state"] == "closed" and entry["injection"] not in now and fault in (None, entry["fault"])
    ]


def _checked(reverted: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What was reverted; raises ActivityFailed where one of it is stuck."""
    stuck = [entry for entry in reverted if entry["state"] == "stuck"]
    if stuck:
        named = "; ".join(f"{entry['injection']} {entry['fault']}: {'; '.join(entry['stuck'])}" for entry in stuck)
        raise ActivityFailed(f"stuck, retried until it is undone: {named}")
    return reverted
