"""What a caller asks nodes about faults that are there: list, revert, verify."""

from typing import Any

from chaosgpu.changes.errors import BadArgument, ChaosgpuError
from chaosgpu.faults import params
from chaosgpu.faults.base import CATALOGUE
from chaosgpu.fleet import local
from chaosgpu.node import client


def check_nodes(nodes: Any) -> list[str]:
    """The nodes named, by default this machine. Raises BadArgument for one that this version cannot reach."""
    if nodes is None:
        return [local.NAME]
    if isinstance(nodes, str):
        nodes = [nodes]
    if not isinstance(nodes, (list, tuple)) or list(nodes) != [local.NAME]:
        raise BadArgument(f"nodes is {params.shown(nodes)}: ['{local.NAME}'] (this machine) is allowed in this version")
    return list(nodes)


def check_identity(name: str, value: Any) -> str | None:
    """An injection's or a run's id, or None. What is malformed is refused: it must not come to mean all or none."""
    return (
        None if value is None else params.text(r"[0-9A-Za-z_.-]+", "an id as faults were listed with", 64)(name, value)
    )


def check_fault(value: Any) -> str | None:
    """A fault's name, or None. An unknown one is refused: otherwise a typing error would read as "nothing is open"."""
    return None if value is None else params.choice(*sorted(CATALOGUE))("fault", value)


def faults(run: str | None = None, fault: str | None = None, recent: bool = False) -> list[dict[str, Any]]:
    """Open faults, and with ``recent`` the closed ones after them. Starts no keeper where nothing is open."""
    request = {"op": "list", "run": run, "fault": fault, "recent": recent}
    answer = client.call(request) if recent else client.call_if_kept(request)
    return list(_unfold(answer, "faults"))


def stuck() -> list[dict[str, Any]]:
    """The faults whose undo failed so far."""
    return [entry for entry in faults() if entry["state"] == "stuck"]


def revert(ids: list[str] | None = None, run: str | None = None, fault: str | None = None) -> list[dict[str, Any]]:
    """Undo the chosen faults (all, when nothing is chosen); each with its verdicts. Safe when there is none.

    A keeper that does not answer is replaced first.
    """
    return list(_unfold(client.rescue({"op": "revert", "ids": ids or [], "run": run, "fault": fault}), "reverted"))


def record(injection: str) -> list[dict[str, Any]]:
    """Every line of one injection's record, the plan first."""
    return list(_unfold(client.call({"op": "record", "id": injection}), "record"))


def verify(run: str, start: bool) -> dict[str, Any]:
    """Ask the kernel what of a run is still there: ``{"verified": count, "left": [...]}``.

    With ``start`` also where every record is closed and the keeper has left: then one is started to look.
    """
    answer = client.rescue({"op": "verify", "ids": [], "run": run}, start)
    _unfold(answer, "left")
    return answer or {"verified": 0, "left": []}


def _unfold(answer: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if answer is None:
        return []
    if "error" in answer:
        raise ChaosgpuError(answer["error"]["message"])
    return list(answer[key])
