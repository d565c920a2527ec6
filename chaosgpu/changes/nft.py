"""A table of nftables (nft(8)) that lives as long as the nft process which made it."""

import select
import shlex
import subprocess
import time
from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple

from chaosgpu.changes.base import ALREADY, FD, LOST, REMOVED, Change, Described, Undone
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip, die_with_parent
from chaosgpu.changes.netns import find, inside, line, succeeds

READY_SECONDS = 10.0


class _Owner:
    """The hand's hold on the nft process whose netlink socket owns the table."""

    def __init__(self, process: "subprocess.Popen[str]", table: str) -> None:
        self.process, self.table = process, table

    def tend(self) -> None:
        if self.process.poll() is not None:
            raise ChangeFailed(f"the nft process that owned table {self.table} ended before its time")

    def close(self) -> str:
        """End it, by the end of its input or by force; what it complained of."""
        try:
            return self.process.communicate(timeout=1)[1].strip()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.communicate()[1].strip()


@dataclass(frozen=True)
class NftTable(Change):
    """Table ``inet <table>`` with ``body``, the text of its chains and rules, in a network namespace.

    With the flag ``owner`` the kernel removes it together with its maker's socket, and lets nobody else change, flush
    or delete it (nft(8), since Linux 5.12 and nft 0.9.9). One line of an interactive nft is one transaction.
    """

    kind: ClassVar[str] = "net.nft"
    bound: ClassVar[str] = FD

    netns: str
    netns_inode: int
    table: str  # it carries the injection's id
    body: str

    def keys(self) -> List[str]:
        return [f"nft:{self.netns_inode}/{self.table}"]

    def name(self) -> str:
        return f"nft table inet {self.table}"

    def values(self) -> Optional[Tuple[Any, Any]]:
        return "absent", "present"

    def _path(self) -> Optional[str]:
        return find(self.netns, self.netns_inode)

    def _argv(self) -> List[str]:
        return ["nft", "--includepath", f"/nowhere/{self.table}", "--interactive"]  # only to be found by `pkill -f`

    def _line(self) -> str:
        rules = " ; ".join(row.strip() for row in self.body.splitlines() if row.strip())
        return f"add table inet {self.table} {{ flags owner ; {rules} ; }}"

    def holds(self, grip: Grip) -> bool:
        netns = self._path()
        return netns is not None and succeeds(netns, ["nft", "list", "table", "inet", self.table], grip)

    def apply(self, grip: Grip) -> Any:
        netns = self._path()
        if netns is None:
            raise Moved(f"network namespace {self.netns} is gone or another one by now")
        if self.holds(grip):
            raise Moved(f"{self.name()} exists already")
        try:
            with inside(netns):
                process = subprocess.Popen(
                    self._argv(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=() if grip.lock_fd is None else (grip.lock_fd,),
                    preexec_fn=die_with_parent,
                    cwd="/",
                    text=True,
                )
        except OSError as error:
            raise ChangeFailed(f"cannot run nft: {error.strerror or error} (is nftables installed?)") from None
        owner = _Owner(process, self.table)
        grip.keep(self.table, owner)
        if not self._told(process, grip):
            grip.let_go(self.table)
            complaint = owner.close().splitlines() or [f"nft did not make it in {READY_SECONDS:g} s"]
            raise ChangeFailed(f"{self.name()}: {complaint[0]}")
        return {"pid": process.pid}

    def _told(self, process: "subprocess.Popen[str]", grip: Grip) -> bool:
        """Have the table made; False when nft complains, ends, or takes too long."""
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(self._line() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return False
        give_up = time.monotonic() + READY_SECONDS
        while time.monotonic() < give_up:
            if select.select([process.stderr], [], [], 0.02)[0]:
                return False
            if self.holds(grip):
                return True
        return False

    def undo(self, observed: Any, grip: Grip) -> Undone:
        owner = grip.let_go(self.table)
        if owner is not None:
            owner.close()
            return Undone(REMOVED)
        if self._path() is None:
            return Undone(LOST, f"network namespace {self.netns} is gone or another one by now")
        if not self.holds(grip):
            return Undone(ALREADY, "the table ended with its owner")
        raise ChangeFailed(f"{self.name()} is there, and only its owner can remove it: `{self.describe().undo}`")

    def describe(self) -> Described:
        netns = self._path()
        argv = shlex.join(line(self.netns if netns is None else netns, self._argv()))
        return Described(
            f"(echo {shlex.quote(self._line())}; exec sleep 3600) | {argv}", f"pkill -f '[n]owhere/{self.table}'"
        )
