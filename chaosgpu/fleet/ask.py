"""What a caller asks nodes about faults that are there: list, revert, verify."""

from typing import Any

from chaosgpu.changes.errors import BadArgument, ChaosgpuError
from chaosgpu.fleet import local
from chaosgpu.node import client


def check_nodes(nodes: Any) -> list[str]:
    """The nodes named, by default this machine. Raises BadArgument for one that this version cannot reach."""
    if nodes is None:
        return [local.NAME]
    if isinstance(nodes, str):
        nodes = [nodes]
    if not isinstance(nodes, (list, tuple)) or list(nodes) != [local.NAME]:
        raise BadArgument(f"nodes is {str(nodes)[:60]!r}: ['{local.NAME}'] (this machine) is allowed in this version")
    return list(nodes)


def faults(run: str | None = None, fault: str | None = None, recent: bool = False) -> list[dict[str, Any]]:
    """Open faults, and with ``recent`` the closed ones after them. Starts no keeper where nothing is open."""
    request = {"op": "list", "run": run, "fault": fault, "recent": recent}
    answer = client.call(request) if recent else client.call_if_kept(request)
    return list(_unfold(answer, "faults"))


def revert(ids: list[str] | None = None, run: str | None = None, fault: str | None = None) -> list[dict[str, Any]]:
    """Undo the chosen faults (all, when nothing is chosen); each with its verdicts. Safe when there is none.

    A keeper that does not answer is replaced first.
    """
    return list(_unfold(client.rescue({"op": "revert", "ids": ids or [], "run": run, "fault": fault}), "reverted"))


def record(injection: str) -> list[dict[str, Any]]:
    """Every line of one injection's record, the plan first."""
    return list(_unfold(client.call({"op": "record", "id": injection}), "record"))


def verify(ids: list[str] | None = None, run: str | None = None) -> dict[str, Any]:
    """Ask the kernel what of the chosen faults is still there: ``{"verified": count, "left": [...]}``."""
    answer = client.rescue({"op": "verify", "ids": ids or [], "run": run})
    _unfold(answer, "left")
    return answer or {"verified": 0, "left": []}


def _unfold(answer: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if answer is None:
        return []
    if "error" in answer:
        raise ChaosgpuError(answer["error"]["message"])
    return list(answer[key])
