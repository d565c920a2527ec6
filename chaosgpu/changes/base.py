"""What every reversible primitive promises, and the two shapes nearly all of them have.

A change is planned by a fault's survey, written to the ledger *with everything its undo needs*, then applied. It is a
frozen dataclass of JSON values, so the undo can be carried out by another process, after a crash, from the record.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Tuple, Type, TypeVar

from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.helpers.tracer import (
    start_time_ticks as start_time_ticks,
)  # the identity that changes of processes record

RESTORED = "restored"  # the old value was put back
ALREADY = "already"  # nothing to do: the old value, or the absence of the created thing, was found
SUPERSEDED = "superseded"  # someone else changed it since; left alone and named
LOST = "lost"  # the object is another one now (its successor is never touched)
REMOVED = "removed"  # the created thing was taken away

FD = "fd"  # the effect ends with the process that holds it
BOOT = "boot"  # the effect ends at the latest with the machine's life
DISK = "disk"  # the effect survives a reboot


class Undone(NamedTuple):
    """One change's verdict, with a sentence where the word alone does not say enough."""

    verdict: str
    detail: str = ""


class Described(NamedTuple):
    """The shell lines an operator would type: the change, and its inverse."""

    apply: str
    undo: str


C = TypeVar("C", bound="Change")
_KINDS: Dict[str, Type["Change"]] = {}


@dataclass(frozen=True)
class Change:
    """One atomic kernel operation, or one object created under the injection's id.

    ``bound`` says how long the effect can outlive us (fd, boot, disk). ``apply`` compares before it sets and
    returns what was read back; ``undo`` gets that observation, or None when no record of it
    survived. Both are given the hand's ``Grip``: its open descriptors, its children and its way to run commands.
    """

    kind: ClassVar[str] = ""
    bound: ClassVar[str] = BOOT

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            if cls.kind in _KINDS:
                raise TypeError(f"two changes are called {cls.kind!r}")
            _KINDS[cls.kind] = cls

    def keys(self) -> List[str]:
        """What this change alters, as conflict keys (``kind:identity``, see chaosgpu.node.keys)."""
        raise NotImplementedError

    def needs(self) -> List[str]:
        """Keys that the undo depends on: no other fault may take them meanwhile."""
        return []

    def apply(self, grip: Grip) -> Any:
        """Make the change and return, as a JSON value, what was read back. Raises ChangeFailed, or Moved."""
        raise NotImplementedError

    def holds(self, grip: Grip) -> bool:
        """Is the effect in place now? Read from the kernel, never from memory."""
        raise NotImplementedError

    def undo(self, observed: Any, grip: Grip) -> Undone:
        """Take the change back. Idempotent; "gone" counts as undone; touches only what the fault left so.

        Whether it worked is asked of ``holds`` by the hand, for every change alike.
        """
        raise NotImplementedError

    def name(self) -> str:
        """What is changed, in an operator's words."""
        raise NotImplementedError

    def values(self) -> Optional[Tuple[Any, Any]]:
        """From what to what, as JSON values; None where the name says it all."""
        return None

    def describe(self) -> Described:
        """The change and its inverse as lines for a root shell. Tests run the inverse."""
        raise NotImplementedError

    def to_json(self) -> Dict[str, Any]:
        """The change as a flat JSON object; its inverse is ``from_json``."""
        return {"kind": self.kind, "bound": self.bound, **asdict(self)}


def from_json(document: Dict[str, Any]) -> Change:
    """Rebuild a change from the ledger. Unknown kinds raise ChangeFailed; fields a newer version added are ignored."""
    cls = _KINDS.get(document.get("kind", ""))
    if cls is None:
        raise ChangeFailed(
            f"the record names a change of kind {document.get('kind')!r}, which this version does not know"
        )
    known = {f.name for f in fields(cls)}
    return cls(**{name: value for name, value in document.items() if name in known})


@dataclass(frozen=True)
class Value(Change):
    """A change of one value: subclasses say how it is read, written and compared."""

    def identity_lost(self) -> str:
        """Why the object is no longer the one surveyed ("" when it still is)."""
        return ""

    def read(self, grip: Grip) -> Any:
        """The present value, or None when the object is gone."""
        raise NotImplementedError

    def write(self, value: Any, grip: Grip) -> None:
        raise NotImplementedError

    def old_value(self) -> Any:
        raise NotImplementedError

    def wanted_value(self) -> Any:
        raise NotImplementedError

    def values(self) -> Optional[Tuple[Any, Any]]:
        return self.old_value(), self.wanted_value()

    def same(self, one: Any, other: Any) -> bool:
        """Compared parsed, never as text (``0-3`` equals ``0,1,2,3``)."""
        return bool(one == other)

    def apply(self, grip: Grip) -> Any:
        lost = self.identity_lost()
        if lost:
            raise Moved(f"{self.name()}: {lost}")
        now = self.read(grip)
        if not self.same(now, self.old_value()):
            raise Moved(f"{self.name()} is {now!r} now and was {self.old_value()!r} when it was surveyed: try again")
        self.write(self.wanted_value(), grip)
        observed = self.read(grip)
        if self.same(observed, self.old_value()):
            raise ChangeFailed(
                f"{self.name()}: the kernel took {self.wanted_value()!r} but the value is still {observed!r}"
            )
        return observed

    def holds(self, grip: Grip) -> bool:
        if self.identity_lost():
            return False
        now = self.read(grip)
        return now is not None and not self.same(now, self.old_value())

    def undo(self, observed: Any, grip: Grip) -> Undone:
        lost = self.identity_lost()
        if lost:
            return Undone(LOST, f"{self.name()}: {lost}")
        now = self.read(grip)
        if now is None:
            return Undone(LOST, f"{self.name()} is gone")
        if self.same(now, self.old_value()):
            return Undone(ALREADY)
        if observed is not None and not self.same(now, observed):
            return Undone(SUPERSEDED, f"{self.name()} was set to {now!r} by someone else and is left alone")
        self.write(self.old_value(), grip)
        return Undone(RESTORED)


@dataclass(frozen=True)
class Created(Change):
    """A change that makes one object whose name carries the injection's id: found by name, so present means ours."""

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "absent", "present"

    def present(self, grip: Grip) -> bool:
        raise NotImplementedError

    def create(self, grip: Grip) -> None:
        raise NotImplementedError

    def remove(self, grip: Grip) -> None:
        raise NotImplementedError

    def apply(self, grip: Grip) -> Any:
        if self.present(grip):
            raise Moved(f"{self.name()} exists already")
        self.create(grip)
        if not self.present(grip):
            raise ChangeFailed(f"{self.name()} was created without an error and is not there")
        return True

    def holds(self, grip: Grip) -> bool:
        return self.present(grip)

    def undo(self, observed: Any, grip: Grip) -> Undone:
        if not self.present(grip):
            return Undone(ALREADY)
        self.remove(grip)
        return Undone(REMOVED)
