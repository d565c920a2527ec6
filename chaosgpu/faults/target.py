"""Which processes a fault hits: how a target is written, who is never chosen, and a choice that can be repeated.

Reading /proc and choosing are apart: ``choose`` is a pure function of the processes read, the target and the protected.
"""

import json
import os
import random
import re
from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Set

from chaosgpu.changes.errors import BadArgument
from chaosgpu.faults import params
from chaosgpu.faults.base import House, Survey

WAYS = ("pid", "command", "cgroup", "container", "unit")
LIMITS = ("count", "percent", "seed")
SHOWN = 5


class Process(NamedTuple):
    """A process as /proc shows it: identity (pid, start), command line, and its cgroup paths, one a hierarchy."""

    pid: int
    start: int
    parent: int
    command: str  # the words of its command line joined by blanks; "" for a kernel thread
    cgroups: FrozenSet[str]
    state: str = "S"


def target(name: str, value: Any) -> Dict[str, Any]:
    """Parse a target: ``{"command": "train.py", "count": 1, "seed": 7}`` or the same as JSON text.

    One of ``pid`` (a number or a list), ``command`` (a regular expression searched in the command line), ``cgroup``
    (path below the cgroup root, its descendants included), ``container`` (id or the start of one) and ``unit``
    (systemd); then ``count`` or ``percent`` of what matches, chosen by ``seed``.
    """
    allowed = f"an object with one of {', '.join(WAYS)}, and {', '.join(LIMITS)} if you like"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise BadArgument(f"{name} is not a target: {allowed} is allowed")
    if "gpu" in value:
        raise BadArgument(f"{name} names a gpu: processes are found by {', '.join(WAYS)} in this version")
    unknown = [key for key in value if key not in WAYS + LIMITS]
    if unknown:
        raise BadArgument(f"{name} has {params.shown(unknown[0])}: {allowed} is allowed")
    params.exactly_one({f"{name}.{way}": value.get(way) for way in WAYS})
    parsed: Dict[str, Any] = {}
    for key, given in value.items():
        if given is not None:
            parsed[key] = _PARSERS[key](f"{name}.{key}", given)
    if "count" in parsed and "percent" in parsed:
        raise BadArgument(f"give {name}.count or {name}.percent, not both")
    return parsed


def _pids(name: str, value: Any) -> List[int]:
    one = params.integer(1, 2**22)
    if isinstance(value, (list, tuple)) and value:
        return sorted({one(name, pid) for pid in value})
    return [one(name, value)]


def _expression(name: str, value: Any) -> str:
    text = params.text(r".+", "a regular expression", 1000)(name, value)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadArgument(f"{name} is {params.shown(value)}: not a regular expression ({error})") from None
    return text


_PARSERS: Dict[str, Any] = {
    "pid": _pids,
    "command": _expression,
    "cgroup": params.text(r"(?!.*(^|/)\.\.(/|$)).*[^/].*", "a path below the cgroup root"),
    "container": params.text(r"[0-9a-f]{4,64}", "a container id (hexadecimal), or 4 or more digits of its start"),
    "unit": params.text(r"[^/\0]+\.[a-z]+", "a systemd unit such as trainer.service"),
    "count": params.integer(1, 100000),
    "percent": params.percent(0.001, 100),
    "seed": params.integer(0, 2**31),
}


def read_processes() -> List[Process]:
    """Every process of this pid namespace, kernel threads included, ordered by pid."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                found.append(process)
    return sorted(found)


def read_process(pid: int) -> Optional[Process]:
    """One process; None when it has ended meanwhile."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as text:
            groups = frozenset(line.rstrip("\n").split(":", 2)[2] for line in text)
    except (OSError, IndexError):
        return None
    return Process(pid, int(fields[19]), int(fields[1]), command, groups, fields[0].decode())


def _matches(process: Process, wanted: Dict[str, Any]) -> bool:
    if "pid" in wanted:
        return process.pid in wanted["pid"]
    if "command" in wanted:
        return re.search(wanted["command"], process.command) is not None
    if "cgroup" in wanted:
        path = "/" + wanted["cgroup"].strip("/")
        return any(group == path or group.startswith(path.rstrip("/") + "/") for group in process.cgroups)
    if "container" in wanted:
        return any(found.startswith(wanted["container"]) for found in containers(process))
    return any(wanted["unit"] in group.split("/") for group in process.cgroups)


_CONTAINER = re.compile(
    r"(?:(?:docker|cri-containerd|crio|libpod|libpod-payload|nerdctl|crun|runc)-)?([0-9a-f]{12,64})(?:\.scope)?"
)


def containers(process: Process) -> Set[str]:
    """The ids of the containers a process is in, by its cgroups: ``docker/<id>``, ``cri-containerd-<id>.scope``."""
    parts = {part for group in process.cgroups for part in group.split("/")}
    return {found.group(1) for found in map(_CONTAINER.fullmatch, parts) if found}


def protected_pids(processes: Iterable[Process], house: House) -> Dict[int, str]:
    """Who is never chosen, and why: pid 1, kernel threads, our own, the caller and its ancestors (its sshd)."""
    reasons = dict.fromkeys(house.pids, "it is chaosgpu's or the caller's own")
    for process in processes:
        if process.pid == 1:
            reasons[1] = "it is pid 1"
        elif process.pid == 2 or process.parent == 2:
            reasons[process.pid] = "it is a kernel thread"
        elif process.pid in house.pids or not process.command:
            reasons.setdefault(process.pid, "it has no command line")
    return reasons


class Choice(NamedTuple):
    """What a target came to: the chosen, how many matched, the protected among those, the containers that it means."""

    chosen: List[Process]
    matched: int
    spared: Dict[int, str]
    containers: List[str]


def choose(processes: List[Process], wanted: Dict[str, Any], protected: Dict[int, str]) -> Choice:
    """The processes a target means: matching, alive, unprotected; then the seeded ``count`` or ``percent``."""
    matching = [process for process in processes if process.state not in ("Z", "X") and _matches(process, wanted)]
    free = [process for process in matching if process.pid not in protected]
    spared = {process.pid: protected[process.pid] for process in matching if process.pid in protected}
    chosen = free
    number = wanted.get("count")
    if number is None and "percent" in wanted and free:
        number = max(1, int(len(free) * wanted["percent"] / 100))
    if number is not None and number < len(free):
        chosen = sorted(random.Random(wanted.get("seed", 0)).sample(sorted(free), number))
    meant = {found for process in matching for found in containers(process) if "container" in wanted}
    return Choice(chosen, len(matching), spared, sorted(f for f in meant if f.startswith(wanted["container"])))


def select(survey: Survey, wanted: Dict[str, Any]) -> List[Process]:
    """Choose on this node for a survey: notes the choice in its facts, and refuses when nothing is left."""
    processes = read_processes()
    choice = choose(processes, wanted, protected_pids(processes, survey.house))
    survey.facts["processes"] = [
        {"pid": process.pid, "start": process.start, "command": process.command[:200]} for process in choice.chosen
    ]
    survey.facts["matched"] = choice.matched
    if choice.spared:
        survey.facts["spared"] = {str(pid): why for pid, why in list(choice.spared.items())[:SHOWN]}
    if len(choice.containers) > 1:
        listed = ", ".join(found[:12] for found in choice.containers[:SHOWN])
        begin = f"{len(choice.containers)} containers begin with {wanted['container']}"
        survey.refuse(f"{begin} ({listed}): give more digits")
    if not choice.chosen:
        looked_for = ", ".join(f"{way} {params.shown(wanted[way])}" for way in WAYS if way in wanted)
        if choice.spared:
            spared = ", ".join(f"{pid} ({why})" for pid, why in list(choice.spared.items())[:SHOWN])
            survey.refuse(f"no process is left for {looked_for}: {choice.matched} match, all protected: {spared}")
        else:
            survey.refuse(f"no process was found for {looked_for} among {len(processes)}")
    return choice.chosen
