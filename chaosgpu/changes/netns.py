"""Where a network change is made: a device by name and ifindex in a network namespace by path and inode.

tc(8) and ip(8) are called as commands, whose lines an operator can repeat, with JSON output. The hand enters a
namespace itself (setns(2)) while it works there, so that each command costs one process and not two.
"""

import contextlib
import ctypes
import glob
import json
import os
import socket
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional

from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.grip import Grip

OWN = "/proc/self/ns/net"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """Be in the namespace at ``netns`` ("": stay) for a while. Raises ChangeFailed when it cannot be entered."""
    if not netns:
        yield
        return
    home = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(netns)
        try:
            yield
        finally:
            if _libc.setns(home, _CLONE_NEWNET) != 0:
                os._exit(1)  # a hand lost in a namespace must not go on: its keeper starts another
    finally:
        os.close(home)


def _enter(netns: str) -> None:
    try:
        fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ChangeFailed(f"network namespace {netns}: {error.strerror}") from None
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise ChangeFailed(f"network namespace {netns} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Place:
    """A device in a namespace. ``netns`` is a path such as /run/netns/blue or /proc/PID/ns/net, "" for our own."""

    netns: str
    netns_inode: int
    device: str
    ifindex: int

    def lost(self) -> str:
        """Why this is not the surveyed device any more, "" when it is."""
        netns = find(self.netns, self.netns_inode)
        if netns is None:
            return f"network namespace {self.netns} is gone or another one by now"
        found = ifindex(netns, self.device)
        if not found:
            return f"device {self.device} is gone"
        return "" if found == self.ifindex else f"device {self.device} is another one by now"

    def key(self) -> str:
        return f"netdev:{self.netns_inode}/{self.ifindex}"


def netns_inode(netns: str) -> int:
    """What identifies a network namespace (namespaces(7)); 0 when there is none at that path."""
    try:
        return os.stat(netns or OWN).st_ino
    except OSError:
        return 0


def find(netns: str, inode: int) -> Optional[str]:
    """The namespace of that inode: where it was surveyed, else under any other path. None when it is gone.

    A namespace outlives the process or the name by which it was found: a container is restarted inside its pod's.
    """
    if netns_inode(netns) == inode:
        return netns
    for pattern in ("/run/netns/*", "/run/docker/netns/*", "/proc/[0-9]*/ns/net"):
        for path in glob.iglob(pattern):
            if netns_inode(path) == inode:
                return path
    return None


def ifindex(netns: str, device: str) -> int:
    """A device's index, which names it for the life of its namespace; 0 when it is not there."""
    with inside(netns):
        try:
            return socket.if_nametoindex(device)
        except OSError:
            return 0


def run(netns: str, argv: List[str], grip: Grip, stdin: Optional[str] = None) -> str:
    """A command in a namespace; its output. Raises ChangeFailed."""
    with inside(netns):
        return grip.run(argv, stdin=stdin)[1]


def succeeds(netns: str, argv: List[str], grip: Grip) -> bool:
    with inside(netns):
        return grip.run(argv, check=False)[0] == 0


def ask(netns: str, argv: List[str], grip: Grip) -> Any:
    """A command's JSON answer; [] when it prints nothing."""
    out = run(netns, argv, grip)
    try:
        return json.loads(out) if out else []
    except ValueError:
        raise ChangeFailed(f"`{' '.join(argv)}` did not print JSON: is iproute2 too old?") from None


def link(netns: str, device: str, grip: Grip) -> Optional[Any]:
    """One entry of `ip -j -d link`, None when the device is not there."""
    if not ifindex(netns, device):
        return None
    found = ask(netns, ["ip", "-j", "-d", "link", "show", "dev", device], grip)
    return next((entry for entry in found if entry.get("ifname") == device), None)


def qdiscs(netns: str, device: str, grip: Grip) -> List[Any]:
    """The queueing disciplines of a device, as `tc -j qdisc` lists them."""
    return list(ask(netns, ["tc", "-j", "qdisc", "show", "dev", device], grip))


def line(netns: str, argv: List[str]) -> List[str]:
    """The command as an operator types it, who is outside the namespace."""
    return ["nsenter", f"--net={netns}", "--", *argv] if netns else argv
