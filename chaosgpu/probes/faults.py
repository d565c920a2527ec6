"""What faults are in place: for steady states, and for the journal."""

from typing import Any, Dict, List, Optional

from chaoslib.types import Configuration, Secrets

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.fleet import ask
from chaosgpu.fleet.inject import fail

__all__ = ["faults_active", "list_faults"]


def faults_active(
    run: str = None,
    fault: str = None,
    nodes: List[str] = None,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> int:
    """How many faults are open on the node, stuck ones included: 0 is a tolerance for "nothing is under a fault".

    ``run`` and ``fault`` (such as storage.fill_disk) narrow the count. Starts nothing where nothing is open.
    """
    try:
        ask.check_nodes(nodes)
        return len(_open(run, fault))
    except ChaosgpuError as error:
        fail(error)


def list_faults(
    run: str = None,
    fault: str = None,
    nodes: List[str] = None,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> List[Dict[str, Any]]:
    """The open faults of the node, oldest first: injection, fault, run, state, deadline, seconds left, undo command."""
    try:
        ask.check_nodes(nodes)
        return _open(run, fault)
    except ChaosgpuError as error:
        fail(error)


def _open(run: Optional[str], fault: Optional[str]) -> List[Dict[str, Any]]:
    return ask.faults(ask.check_identity("run", run), ask.check_fault(fault))
