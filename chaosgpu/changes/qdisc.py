"""Queueing disciplines with their filters (tc(8)), and the ifb device that ingress is redirected to.

What is below a qdisc (leaves, filters) goes with it, so a tree is one object: made by one tc in batch mode, the qdisc
first, so that whatever part of it was made is found by the qdisc and removed with it.
"""

import shlex
from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional, Set

from chaosgpu.changes.base import LOST, SUPERSEDED, Created, Described, Undone
from chaosgpu.changes.errors import Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import Place, ask, find, ifindex, line, qdiscs, run


@dataclass(frozen=True)
class _Tree(Created):
    """A qdisc on a device with what is below it, lost with the device or its namespace."""

    netns: str
    netns_inode: int
    device: str
    ifindex: int

    @property
    def place(self) -> Place:
        return Place(self.netns, self.netns_inode, self.device, self.ifindex)

    def path(self) -> str:
        """Where the namespace is now; where it was when it is gone."""
        found = find(self.netns, self.netns_inode)
        return self.netns if found is None else found

    def add(self) -> List[str]:
        """The tc line that makes the qdisc."""
        raise NotImplementedError

    def delete(self) -> List[str]:
        """The tc line that removes it with all below."""
        raise NotImplementedError

    def lines_below(self) -> List[List[str]]:
        raise NotImplementedError

    def keys(self) -> List[str]:
        return [self.place.key()]

    def _lines(self) -> List[List[str]]:
        return [self.add(), *self.lines_below()]

    def apply(self, grip: Grip) -> Any:
        lost = self.place.lost()
        if lost:
            raise Moved(lost)
        return super().apply(grip)

    def holds(self, grip: Grip) -> bool:
        return not self.place.lost() and self.present(grip)

    def undo(self, observed: Any, grip: Grip) -> Undone:
        lost = self.place.lost()
        return Undone(LOST, lost) if lost else super().undo(observed, grip)

    def create(self, grip: Grip) -> None:
        batch = "\n".join(" ".join(words) for words in self._lines())
        run(self.path(), ["tc", "-batch", "-"], grip, stdin=batch + "\n")

    def remove(self, grip: Grip) -> None:
        run(self.path(), ["tc", *self.delete()], grip)

    def describe(self) -> Described:
        netns = self.path()
        made = [shlex.join(line(netns, ["tc", *words])) for words in self._lines()]
        return Described("; ".join(made), shlex.join(line(netns, ["tc", *self.delete()])))


@dataclass(frozen=True)
class RootQdisc(_Tree):
    """A root qdisc whose ``handle`` comes from the injection's id, of kind and options ``root``, with ``below``.

    Deleting it gives the device its default back (measured: fq_codel, mq or noqueue).
    """

    kind: ClassVar[str] = "net.qdisc"

    handle: str
    root: List[str] = field(default_factory=list)
    below: List[List[str]] = field(default_factory=list)

    def name(self) -> str:
        return f"root qdisc {self.handle} of device {self.device}"

    def add(self) -> List[str]:
        return ["qdisc", "add", "dev", self.device, "root", "handle", self.handle, *self.root]

    def delete(self) -> List[str]:
        return ["qdisc", "del", "dev", self.device, "root", "handle", self.handle]

    def lines_below(self) -> List[List[str]]:
        return self.below

    def present(self, grip: Grip) -> bool:
        found = qdiscs(self.path(), self.device, grip)
        return any(entry.get("root") and entry.get("handle") == self.handle for entry in found)


@dataclass(frozen=True)
class IngressQdisc(_Tree):
    """The clsact qdisc of a device that has none, with our ingress filters. Their preferences tell them from others'.

    A clsact cannot carry an id, so it is left alone when someone else has put a filter there meanwhile.
    """

    kind: ClassVar[str] = "net.clsact"

    filters: List[List[str]] = field(default_factory=list)  # each: preference, then match and action

    def name(self) -> str:
        return f"clsact qdisc of device {self.device}"

    def add(self) -> List[str]:
        return ["qdisc", "add", "dev", self.device, "clsact"]

    def delete(self) -> List[str]:
        return ["qdisc", "del", "dev", self.device, "clsact"]

    def lines_below(self) -> List[List[str]]:
        return [["filter", "add", "dev", self.device, "ingress", "pref", *words] for words in self.filters]

    def present(self, grip: Grip) -> bool:
        return any(entry.get("kind") == "clsact" for entry in qdiscs(self.path(), self.device, grip))

    def undo(self, observed: Any, grip: Grip) -> Undone:
        if not self.place.lost() and self.present(grip):
            ours = {int(words[0]) for words in self.filters}
            ingress, egress = self._preferences("ingress", grip), self._preferences("egress", grip)
            if egress or ingress - ours:
                return self._leave_to_others(ingress & ours, grip)
        return super().undo(observed, grip)

    def _preferences(self, side: str, grip: Grip) -> Set[int]:
        listed = ask(self.path(), ["tc", "-j", "filter", "show", "dev", self.device, side], grip)
        return {int(entry["pref"]) for entry in listed if "pref" in entry}

    def _leave_to_others(self, ours: Set[int], grip: Grip) -> Undone:
        for preference in sorted(ours):
            argv = ["tc", "filter", "del", "dev", self.device, "ingress", "pref", str(preference)]
            run(self.path(), argv, grip)
        return Undone(SUPERSEDED, f"{self.name()} has filters of someone else: ours are removed, it is left")


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

    def path(self) -> Optional[str]:
        """Where the namespace is now; None when it is gone."""
        return find(self.netns, self.netns_inode)

    def present(self, grip: Grip) -> bool:
        netns = self.path()
        return netns is not None and ifindex(netns, self.device) != 0

    def _lines(self) -> List[List[str]]:
        return [
            ["ip", "link", "add", self.device, "up", "type", "ifb"],
            ["tc", "qdisc", "add", "dev", self.device, "root", *self.qdisc],
        ]

    def create(self, grip: Grip) -> None:
        netns = self.path()
        if netns is None:
            raise Moved(f"network namespace {self.netns} is gone or another one by now")
        for words in self._lines():
            run(netns, words, grip)

    def remove(self, grip: Grip) -> None:
        run(self.path() or "", ["ip", "link", "del", "dev", self.device], grip)

    def describe(self) -> Described:
        netns = self.path() or self.netns
        made = [shlex.join(line(netns, words)) for words in self._lines()]
        return Described("; ".join(made), shlex.join(line(netns, ["ip", "link", "del", "dev", self.device])))
