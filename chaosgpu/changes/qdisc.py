"""Queueing disciplines and filters (tc(8)), and the ifb device that ingress is redirected to.

A root qdisc made for a fault carries the injection's handle, and everything below it (leaves, filters) goes with it: it
is one object whatever it holds. Deleting it gives the device its default back (measured: fq_codel, mq or noqueue).
"""

import shlex
from dataclasses import dataclass, field
from typing import Any, ClassVar, List

from chaosgpu.changes.base import LOST, SUPERSEDED, Created, Described, Undone
from chaosgpu.changes.errors import Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import Place, ask, inside, link, netns_inode, qdiscs


@dataclass(frozen=True)
class _OnDevice(Created):
    """A thing made on a device: lost with the device or its namespace, never looked for on a successor."""

    netns: str
    netns_inode: int
    device: str
    ifindex: int

    @property
    def place(self) -> Place:
        return Place(self.netns, self.netns_inode, self.device, self.ifindex)

    def keys(self) -> List[str]:
        return [self.place.key()]

    def apply(self, grip: Grip) -> Any:
        lost = self.place.lost(grip)
        if lost:
            raise Moved(lost)
        return super().apply(grip)

    def holds(self, grip: Grip) -> bool:
        return not self.place.lost(grip) and self.present(grip)

    def undo(self, observed: Any, grip: Grip) -> Undone:
        lost = self.place.lost(grip)
        return Undone(LOST, lost) if lost else super().undo(observed, grip)

    def _line(self, argv: List[str]) -> str:
        return " ".join(shlex.quote(word) for word in inside(self.netns, argv))


@dataclass(frozen=True)
class RootQdisc(_OnDevice):
    """A root qdisc ``handle`` of ``kind`` with what is below it: each of ``below`` is a tc line without the device.

    All is made by one tc(8) in batch mode, root first, so that whatever part was made is found and removed by the root.
    """

    kind: ClassVar[str] = "net.qdisc"

    handle: str
    root: List[str] = field(default_factory=list)
    below: List[List[str]] = field(default_factory=list)

    def name(self) -> str:
        return f"root qdisc {self.handle} of device {self.device}"

    def present(self, grip: Grip) -> bool:
        found = qdiscs(self.netns, self.device, grip)
        return any(entry.get("root") and entry.get("handle") == self.handle for entry in found)

    def _lines(self) -> List[List[str]]:
        """Every tc command, the device filled in after the object and verb."""
        first = ["qdisc", "add", "dev", self.device, "root", "handle", self.handle, *self.root]
        return [first, *([line[0], line[1], "dev", self.device, *line[2:]] for line in self.below)]

    def create(self, grip: Grip) -> None:
        batch = "\n".join(" ".join(line) for line in self._lines())
        grip.run(inside(self.netns, ["tc", "-batch", "-"]), stdin=batch + "\n")

    def remove(self, grip: Grip) -> None:
        grip.run(inside(self.netns, self._removal()))

    def _removal(self) -> List[str]:
        return ["tc", "qdisc", "del", "dev", self.device, "root", "handle", self.handle]

    def describe(self) -> Described:
        return Described("; ".join(self._line(["tc", *line]) for line in self._lines()), self._line(self._removal()))


@dataclass(frozen=True)
class Clsact(_OnDevice):
    """The clsact qdisc of a device, where there was none. It stays when someone else put filters there meanwhile."""

    kind: ClassVar[str] = "net.clsact"

    def name(self) -> str:
        return f"clsact qdisc of device {self.device}"

    def present(self, grip: Grip) -> bool:
        return any(entry.get("kind") == "clsact" for entry in qdiscs(self.netns, self.device, grip))

    def create(self, grip: Grip) -> None:
        grip.run(inside(self.netns, ["tc", "qdisc", "add", "dev", self.device, "clsact"]))

    def remove(self, grip: Grip) -> None:
        grip.run(inside(self.netns, ["tc", "qdisc", "del", "dev", self.device, "clsact"]))

    def undo(self, observed: Any, grip: Grip) -> Undone:
        if not self.place.lost(grip) and self.present(grip):
            for side in ("ingress", "egress"):
                if ask(self.netns, ["tc", "-j", "filter", "show", "dev", self.device, side], grip):
                    return Undone(SUPERSEDED, f"{self.name()} has {side} filters of someone else and is left alone")
        return super().undo(observed, grip)

    def describe(self) -> Described:
        tc = ["tc", "qdisc"]
        return Described(
            self._line([*tc, "add", "dev", self.device, "clsact"]),
            self._line([*tc, "del", "dev", self.device, "clsact"]),
        )


@dataclass(frozen=True)
class IngressFilter(_OnDevice):
    """One filter on a device's ingress, known by its ``preference``, which the survey found unused."""

    kind: ClassVar[str] = "net.filter"

    preference: int
    match: List[str] = field(default_factory=list)  # protocol, flower, keys, action

    def name(self) -> str:
        return f"ingress filter {self.preference} of device {self.device}"

    def present(self, grip: Grip) -> bool:
        if not any(entry.get("kind") in ("clsact", "ingress") for entry in qdiscs(self.netns, self.device, grip)):
            return False
        found = ask(self.netns, ["tc", "-j", "filter", "show", "dev", self.device, "ingress"], grip)
        return any(entry.get("pref") == self.preference for entry in found)

    def _argv(self, verb: str) -> List[str]:
        return ["tc", "filter", verb, "dev", self.device, "ingress", "pref", str(self.preference)]

    def create(self, grip: Grip) -> None:
        grip.run(inside(self.netns, [*self._argv("add"), *self.match]))

    def remove(self, grip: Grip) -> None:
        grip.run(inside(self.netns, self._argv("del")))

    def describe(self) -> Described:
        return Described(self._line([*self._argv("add"), *self.match]), self._line(self._argv("del")))


@dataclass(frozen=True)
class IfbLink(Created):
    """An ifb device named by the injection's id, up, with ``qdisc`` at its root; all of it goes with the device."""

    kind: ClassVar[str] = "net.ifb"

    netns: str
    netns_inode: int
    device: str
    qdisc: List[str] = field(default_factory=list)

    def keys(self) -> List[str]:
        return [f"netdev:{self.netns_inode}/{self.device}"]

    def name(self) -> str:
        return f"ifb device {self.device}"

    def present(self, grip: Grip) -> bool:
        return netns_inode(self.netns) == self.netns_inode and link(self.netns, self.device, grip) is not None

    def _lines(self) -> List[List[str]]:
        return [
            ["ip", "link", "add", self.device, "type", "ifb"],
            ["ip", "link", "set", "dev", self.device, "up"],
            ["tc", "qdisc", "add", "dev", self.device, "root", *self.qdisc],
        ]

    def create(self, grip: Grip) -> None:
        for line in self._lines():
            grip.run(inside(self.netns, line))

    def remove(self, grip: Grip) -> None:
        grip.run(inside(self.netns, ["ip", "link", "del", "dev", self.device]))

    def describe(self) -> Described:
        lines = [" ".join(inside(self.netns, line)) for line in self._lines()]
        return Described("; ".join(lines), " ".join(inside(self.netns, ["ip", "link", "del", "dev", self.device])))
