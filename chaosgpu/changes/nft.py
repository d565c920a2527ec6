"""A table of nftables (nft(8)): one transaction makes all of it, one removes all of it."""

import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, List

from chaosgpu.changes.base import LOST, Created, Described, Undone
from chaosgpu.changes.errors import Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import line, netns_inode, run, succeeds


@dataclass(frozen=True)
class NftTable(Created):
    """Table ``inet chaosgpu_<id>`` with ``body``, the text of its chains and rules, in a network namespace."""

    kind: ClassVar[str] = "net.nft"

    netns: str
    netns_inode: int
    table: str
    body: str

    def keys(self) -> List[str]:
        return [f"nft:{self.netns_inode}/{self.table}"]

    def name(self) -> str:
        return f"nft table inet {self.table}"

    def _lost(self) -> str:
        same = netns_inode(self.netns) == self.netns_inode
        return "" if same else f"network namespace {self.netns} is gone or another one by now"

    def present(self, grip: Grip) -> bool:
        argv = ["nft", "list", "table", "inet", self.table]
        return not self._lost() and succeeds(self.netns, argv, grip)

    def apply(self, grip: Grip) -> Any:
        if self._lost():
            raise Moved(self._lost())
        return super().apply(grip)

    def create(self, grip: Grip) -> None:
        run(self.netns, ["nft", "-f", "-"], grip, stdin=f"table inet {self.table} {{\n{self.body}\n}}\n")

    def remove(self, grip: Grip) -> None:
        run(self.netns, ["nft", "delete", "table", "inet", self.table], grip)

    def undo(self, observed: Any, grip: Grip) -> Undone:
        return Undone(LOST, self._lost()) if self._lost() else super().undo(observed, grip)

    def describe(self) -> Described:
        nft = " ".join(line(self.netns, ["nft"]))
        body = shlex.quote(" ".join(f"table inet {self.table} {{ {self.body} }}".split()))
        return Described(f"{nft} {body}", f"{nft} delete table inet {self.table}")
