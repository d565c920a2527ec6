"""A wire between the ranks: two network namespaces of the lab's own, joined by a veth pair.

Neither the machine's interfaces nor /run/netns are touched: the namespaces are held by mounts in the lab's directory.
"""

import os
from contextlib import suppress
from pathlib import Path

from chaosgpu.lab.cgroups import RANKS
from chaosgpu.lab.commands import found, run
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.place import Place

ADDRESSES = ("10.77.77.1", "10.77.77.2")
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class Network:
    """The lab's namespaces: ``<lab>/netns/rank0`` and ``rank1``, each with one interface ``wire``."""

    name = "network namespaces"

    def __init__(self, place: Place) -> None:
        self._directory = place.directory / "netns"

    def missing(self, lock: int) -> str | None:
        """Why there can be no namespaces here; None when there can."""
        for tool, package in TOOLS.items():
            if not found(tool):
                return f"{tool} is not installed (apt-get install {package})"
        try:
            run(lock, "unshare", "--net", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two")
        except LabError as error:
            return str(error)
        return None

    def of(self, rank: int) -> Path:
        """The file that is a rank's namespace: ``nsenter --net=FILE COMMAND`` runs in it."""
        return self._directory / f"rank{rank}"

    def healthy(self, lock: int) -> bool:
        """Whether both namespaces are there and their wire is up."""
        try:
            return all("state UP" in self._ip(lock, rank, "link", "show", "dev", "wire") for rank in RANKS)
        except LabError:
            return False

    def ensure(self, lock: int) -> bool:
        """Make both anew unless both are healthy; True when they were made. Whoever lived in old ones is cut off."""
        if self.healthy(lock):
            return False
        self.remove(lock)
        self._directory.mkdir(exist_ok=True)
        for rank in RANKS:
            self.of(rank).touch()
            run(lock, "unshare", f"--net={self.of(rank)}", "true")
        other = str(self.of(1))
        self._ip(lock, 0, "link", "add", "name", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
        for rank in RANKS:
            self._ip(lock, rank, "address", "add", f"{ADDRESSES[rank]}/30", "dev", "wire")
            self._ip(lock, rank, "link", "set", "dev", "lo", "up")
            self._ip(lock, rank, "link", "set", "dev", "wire", "up")
        return True

    def remove(self, lock: int) -> bool:
        """Let both go; True when there was one."""
        there = False
        for rank in RANKS:
            file = self.of(rank)
            while file.exists() and file.stat().st_dev != self._directory.stat().st_dev:
                run(lock, "umount", file)
                there = True
            file.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self._directory.rmdir()
        return there

    def holds(self, rank: int, pid: int) -> bool:
        """Whether a process lives in a rank's namespace."""
        try:
            return os.path.samestat(self.of(rank).stat(), Path(f"/proc/{pid}/ns/net").stat())
        except OSError:
            return False

    def _ip(self, lock: int, rank: int, *words: str) -> str:
        return run(lock, "nsenter", f"--net={self.of(rank)}", "ip", *words)
