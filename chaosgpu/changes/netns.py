"""Where a network change is made: a device by name and ifindex in a network namespace by path and inode.

tc(8) and ip(8) are called as commands, whose lines an operator can repeat, with JSON output.
"""

import json
import os
from dataclasses import dataclass
from typing import Any, List, Optional

from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.grip import Grip

OWN = "/proc/self/ns/net"


@dataclass(frozen=True)
class Place:
    """A device in a namespace. ``netns`` is a path such as /run/netns/blue or /proc/PID/ns/net, "" for our own."""

    netns: str
    netns_inode: int
    device: str
    ifindex: int

    def lost(self, grip: Grip) -> str:
        """Why this is not the surveyed device any more, "" when it is."""
        if netns_inode(self.netns) != self.netns_inode:
            return f"network namespace {self.netns} is gone or another one by now"
        found = link(self.netns, self.device, grip)
        if found is None:
            return f"device {self.device} is gone"
        return "" if found["ifindex"] == self.ifindex else f"device {self.device} is another one by now"

    def key(self) -> str:
        return f"netdev:{self.netns_inode}/{self.ifindex}"


def inside(netns: str, argv: List[str]) -> List[str]:
    """The command as it runs in a namespace."""
    return ["nsenter", f"--net={netns}", "--", *argv] if netns else argv


def netns_inode(netns: str) -> int:
    """What identifies a network namespace (namespaces(7)); 0 when there is none at that path."""
    try:
        return os.stat(netns or OWN).st_ino
    except OSError:
        return 0


def ask(netns: str, argv: List[str], grip: Grip) -> Any:
    """A command's JSON answer; [] when it prints nothing."""
    _, out, _ = grip.run(inside(netns, argv))
    try:
        return json.loads(out) if out else []
    except ValueError:
        raise ChangeFailed(f"`{' '.join(argv)}` did not print JSON: is iproute2 too old?") from None


def link(netns: str, device: str, grip: Grip) -> Optional[Any]:
    """One line of `ip -j -d link`, None when the device is not there."""
    status, out, _ = grip.run(inside(netns, ["ip", "-j", "-d", "link", "show", "dev", device]), check=False)
    if status != 0 or not out:
        return None
    return next((entry for entry in json.loads(out) if entry.get("ifname") == device), None)


def qdiscs(netns: str, device: str, grip: Grip) -> List[Any]:
    """The queueing disciplines of a device, as `tc -j qdisc` lists them."""
    return list(ask(netns, ["tc", "-j", "qdisc", "show", "dev", device], grip))
