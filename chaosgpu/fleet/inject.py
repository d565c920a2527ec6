"""From an activity's arguments to the nodes and back: validate, remember the run, send, fold the answers."""

import uuid
from typing import Any, NoReturn

from chaoslib.exceptions import ActivityFailed

from chaosgpu.changes.errors import BadArgument, ChaosgpuError
from chaosgpu.faults import params
from chaosgpu.faults.base import CATALOGUE, RAISE_CAP, arguments_of, build, duration_seconds
from chaosgpu.fleet import local, runs
from chaosgpu.fleet.ask import check_nodes

OPT_OUTS = (RAISE_CAP, "concurrent", "unsupervised", "hardware")  # understood for every fault


def inject(
    fault: str,
    arguments: dict[str, Any],
    *,
    duration: Any,
    nodes: Any = None,
    dry_run: Any = False,
    allow: Any = None,
    outlive_run: Any = False,
    configuration: Any = None,
) -> dict[str, Any]:
    """Start one fault on the chosen nodes and return what was changed, the proof and the way back.

    ``duration`` is in seconds or text such as ``90s``; at most 1 h unless ``allow`` holds ``long_duration``. The output
    is ``{"run", "fault", "nodes": {name: {...}}}``. Raises ActivityFailed with one line; nothing then stays in place.
    """
    try:
        allowed = _allow(allow, fault)
        seconds = duration_seconds(duration, allowed)
        dry = params.flag("dry_run", dry_run)
        outlive = params.flag("outlive_run", outlive_run)
        chosen = check_nodes(nodes)
        checked = arguments_of(build(fault, arguments))
        request = {
            "op": "inject",
            "request": uuid.uuid4().hex,
            "run": runs.this_run(),
            "fault": fault,
            "arguments": checked,
            "duration_seconds": seconds,
            "allow": allowed,
            "owner": "peer",
            "outlive_run": outlive,
            "dry_run": dry,
        }
        if not dry:
            runs.remember(runs.this_run(), chosen, local.NAME)
        answer = local.call(request)
    except ChaosgpuError as error:
        fail(error)
    if "error" in answer:
        raise ActivityFailed(_told(answer["error"]))
    return {"run": runs.this_run(), "fault": fault, "nodes": {answer["node"]: answer}}


def fail(error: ChaosgpuError) -> NoReturn:
    """An expected error as the toolkit wants it."""
    raise ActivityFailed(str(error)) from None


def _told(problem: dict[str, Any]) -> str:
    """A node's refusal in one line; where something had been touched, what became of that."""
    message = str(problem["message"])
    if "stuck" in problem:
        message += (
            f"; what was done of it is STUCK and retried until it is undone: {'; '.join(problem['stuck'])}"
            f" (chaos gpu record {problem['injection']})"
        )
    elif "injection" in problem:
        message += f"; what was done of it is undone (chaos gpu record {problem['injection']})"
    return " ".join(message.split())


def _allow(allow: Any, fault: str) -> list[str]:
    if allow is None:
        return []
    if isinstance(allow, str):
        allow = [word.strip() for word in allow.split(",") if word.strip()]
    known = (*OPT_OUTS, *(CATALOGUE[fault].declaration.opt_outs if fault in CATALOGUE else ()))
    if not isinstance(allow, (list, tuple)) or not all(isinstance(word, str) and word in known for word in allow):
        raise BadArgument(f"allow is {params.shown(allow)}: a list of {', '.join(known)} is allowed")
    return list(allow)
