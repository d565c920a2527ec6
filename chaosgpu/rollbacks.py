"""What an experiment takes back. Use these as actions in ``rollbacks``, or in the method to end a fault early.

Nothing depends on them: a fault ends by itself at its deadline, and when the experiment's process is gone.
"""

from typing import Any, Dict, List

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

    Safe when nothing was injected. The output tells each change's verdict: restored, removed, already, superseded
    (someone else changed it since: left alone) or lost (it is another object now). Fails, naming it, when one is stuck.
    """
    try:
        ask.check_nodes(nodes)
        ids = [injection] if injection else None
        return _told(ask.revert(ids, None if injection else runs.this_run(), fault))
    except ChaosgpuError as error:
        fail(error)


def revert_all(nodes: List[str] = None, configuration: Configuration = None, secrets: Secrets = None) -> Dict[str, Any]:
    """Undo every fault of the node now, whichever run it is of. Safe when there is none. Output as for revert."""
    try:
        ask.check_nodes(nodes)
        return _told(ask.revert())
    except ChaosgpuError as error:
        fail(error)


def verify_restored(
    nodes: List[str] = None, configuration: Configuration = None, secrets: Secrets = None
) -> Dict[str, Any]:
    """Fail, naming it, while anything of this run is open or the kernel shows that a change of it still holds.

    The output is ``{"verified": number of injections looked at, "left": []}``.
    """
    try:
        ask.check_nodes(nodes)
        answer = ask.verify(run=runs.this_run())
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


def _told(reverted: List[Dict[str, Any]]) -> Dict[str, Any]:
    stuck = [entry for entry in reverted if entry["state"] == "stuck"]
    if stuck:
        named = "; ".join(f"{entry['injection']} {entry['fault']}: {'; '.join(entry['stuck'])}" for entry in stuck)
        raise ActivityFailed(f"stuck, retried until it is undone: {named}")
    return {"reverted": reverted}
