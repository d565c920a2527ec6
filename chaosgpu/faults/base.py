"""A fault author's whole job: parameters, a survey, a list of changes, evidence, and a declaration.

Everything else (ledger, deadline, locks, dry run, fan-out, journal) is generic and lives in chaosgpu.node and
chaosgpu.fleet. A new fault is a class here-shaped in its family module, its action function and its test.
"""

import dataclasses
from typing import Any, ClassVar, Collection, Dict, FrozenSet, List, Tuple, Type, TypeVar

from chaosgpu.changes.base import Change
from chaosgpu.changes.errors import BadArgument
from chaosgpu.changes.grip import Grip
from chaosgpu.faults import params

LAYERS = ("accelerator", "fabric", "host", "storage", "training", "inference", "orchestration")


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a fault promises and what it does not; shown by ``chaos gpu catalogue``, read by the catalogue test."""

    layer: str
    summary: str  # one line, what it does
    reversible: str  # exact | distribution | one-shot | lower-layer-only
    takes_effect: str  # now | new-connections | next-launch
    scope: str  # what is hit: process, cgroup, device, filesystem, node
    needs: Tuple[str, ...]  # root, CAP_..., tool:tc, module:sch_netem, cgroup:cpu
    certifies: str
    does_not_certify: str
    metrics: Tuple[str, ...]  # the series that show it
    danger: str = "none"  # none | service | hardware
    residue: str = "none"  # what an undo cannot take back
    opt_outs: Tuple[str, ...] = ()  # the words its ``allow`` understands
    seen_on: Tuple[str, ...] = ()  # simulator | guest | host | hardware (model, driver, date)


@dataclasses.dataclass(frozen=True)
class House:
    """Our own processes and directories on this node: never a target, never starved by a fault."""

    state_dir: str
    pids: Tuple[int, ...]  # keeper, standby, this hand, and the caller with its ancestors
    interpreter: str = "/usr/bin/python3"


@dataclasses.dataclass
class Survey:
    """What a survey read and every reason to refuse. Filled by ``Fault.survey``; nothing is written while it runs."""

    injection: str  # the injection's id: names of created things carry it
    house: House
    grip: Grip  # to run commands that only read
    allow: FrozenSet[str] = frozenset()
    facts: Dict[str, Any] = dataclasses.field(default_factory=dict)  # JSON; kept in the record, given to evidence
    refusals: List[str] = dataclasses.field(default_factory=list)
    warnings: List[str] = dataclasses.field(default_factory=list)

    def refuse(self, reason: str, unless: str = "") -> None:
        """Note a reason not to go on. With ``unless`` the operator may allow it by that name; then it is a warning."""
        if unless and unless in self.allow:
            self.warnings.append(f"{reason} (allowed by {unless!r})")
        elif unless:
            self.refusals.append(f"{reason} (allow: [{unless!r}] permits it)")
        else:
            self.refusals.append(reason)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault with its parameters. Subclasses are frozen dataclasses whose fields are ``params.param(...)``.

    The methods run in a hand on the node, in this order: survey, changes, (each change applied), evidence; and after
    the undo, perhaps in another process that has only the record: restored.
    """

    name: ClassVar[str] = ""  # family.fault
    declaration: ClassVar[Declaration]

    def check(self) -> None:
        """Refuse combinations of parameters that can never work (BadArgument). Runs on the caller's side too."""

    def survey(self, survey: Survey) -> None:
        """Read the node: fill ``survey.facts`` with what is and was, call ``survey.refuse`` for each obstacle."""
        raise NotImplementedError

    def changes(self, survey: Survey) -> List[Change]:
        """The changes, in the order they are applied. Called only when nothing was refused."""
        raise NotImplementedError

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        """Measure, by another interface than the write, that the fault took effect. Raises NoEffect when it did not."""
        raise NotImplementedError

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        """Measure, for the record, how the node is after the undo. Raises ChangeFailed only where something of ours is
        left that no change's ``holds`` can see; what someone else did meanwhile is told, not fought."""
        return {}


CAP_SECONDS = 3600.0
RAISED_CAP_SECONDS = 7 * 86400.0
RAISE_CAP = "long_duration"  # the word in ``allow`` that raises the cap


def duration_seconds(duration: Any, allow: Collection[str]) -> float:
    """A fault's duration in seconds: mandatory, finite, at most 1 h, or 7 days when ``allow`` holds the word."""
    if RAISE_CAP in allow:
        return params.seconds(1, RAISED_CAP_SECONDS)("duration", duration)
    try:
        return params.seconds(1, CAP_SECONDS)("duration", duration)
    except BadArgument as error:
        raise BadArgument(f"{error}; allow: ['{RAISE_CAP}'] raises the cap to 7 days") from None


F = TypeVar("F", bound=Type[Fault])
CATALOGUE: Dict[str, Type[Fault]] = {}


def fault(cls: F) -> F:
    """Class decorator: enter a fault into the catalogue."""
    if cls.name in CATALOGUE:
        raise TypeError(f"two faults are called {cls.name!r}")
    CATALOGUE[cls.name] = cls
    return cls


def build(name: str, arguments: Dict[str, Any]) -> Fault:
    """A checked fault from its name and its arguments as they came. Raises BadArgument with one line."""
    cls = CATALOGUE.get(name)
    if cls is None:
        raise BadArgument(f"there is no fault {params.shown(name)}: {', '.join(sorted(CATALOGUE))} are known")
    made = params.build(cls, arguments)
    made.check()
    return made


def arguments_of(fault: Fault) -> Dict[str, Any]:
    """The parameters as JSON: what ``build`` takes."""
    return dataclasses.asdict(fault)
