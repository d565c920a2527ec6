"""Faults of storage: a full filesystem, slow reads and writes."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, List, Optional, Set

from chaosgpu.changes.base import Change
from chaosgpu.changes.cgroup import ControllerEnabled, members
from chaosgpu.changes.errors import BadArgument, NoEffect
from chaosgpu.changes.file_value import inode_of, read_file
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.held_file import HeldFile
from chaosgpu.changes.io_limit import BlkioThrottle, IoMax, io_max, throttle
from chaosgpu.faults import block, io_probe, params
from chaosgpu.faults.base import Declaration, Fault, Survey, fault
from chaosgpu.faults.cgroups import Hierarchy, directory_of, hierarchy
from chaosgpu.faults.target import select, target

MEMORY_RESERVE_BYTES = 512 * 1024**2
LEAST_HELD_BYTES = 1024 * 1024


def usage(path: str) -> Dict[str, Any]:
    """A filesystem's space by df's arithmetic: Use% is used / (used + available), reserved blocks in neither."""
    found = os.statvfs(path)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    available = found.f_bavail * found.f_frsize
    capacity = used + available
    return {
        "size_bytes": found.f_blocks * found.f_frsize,
        "used_bytes": used,
        "available_bytes": available,
        "used_percent": round(100 * used / capacity, 2) if capacity else 100.0,
    }


@fault
@dataclass(frozen=True)
class FillDisk(Fault):
    """A filesystem is filled to a percentage, by a number of bytes, or up to a rest."""

    name: ClassVar[str] = "storage.fill_disk"
    declaration: ClassVar[Declaration] = Declaration(
        layer="storage",
        summary="fills a filesystem with blocks held by an unnamed file",
        reversible="exact",
        takes_effect="now",
        scope="filesystem",
        needs=("root",),
        certifies="how checkpoints, caches and logs on that filesystem fail or are cleaned up when space runs out",
        does_not_certify="a slow or failing disk, or a full one for root: reserved blocks stay free",
        metrics=("node_filesystem_avail_bytes", "node_filesystem_size_bytes"),
        residue="what others deleted, moved or failed to write meanwhile",
        opt_outs=("kubelet_eviction", "memory_filesystem"),
        seen_on=("host", "guest"),
    )

    path: str = params.param(params.path(), doc="a directory on the filesystem")
    percent: Optional[float] = params.param(params.percent(1, 100), None, doc="df's Use% to reach")
    bytes: Optional[int] = params.param(params.size_bytes(LEAST_HELD_BYTES), None, doc="how much to take")
    leave_bytes: Optional[int] = params.param(params.size_bytes(0), None, doc="how much to leave to users")

    def check(self) -> None:
        params.exactly_one({"percent": self.percent, "bytes": self.bytes, "leave_bytes": self.leave_bytes})

    def survey(self, survey: Survey) -> None:
        try:
            directory = block.directory_of(self.path)
            mount = block.mount_of(directory)
            filesystem = block.filesystem_of(directory)
            before = usage(directory)
        except OSError as error:
            survey.refuse(f"path {self.path}: {error.strerror}")
            return
        self._survey_kind(survey, mount, directory)
        survey.facts.update({"directory": directory, "filesystem": filesystem, "mount": mount.point, "before": before})
        why = block.vital_filesystems(survey.house).get(filesystem)
        if why:
            survey.refuse(f"the filesystem at {mount.point} is never filled: {why}")
        kubelet = block.kubelet_filesystems().get(filesystem)
        if kubelet:
            survey.refuse(f"the filesystem at {mount.point}: {kubelet}", unless="kubelet_eviction")
        wanted = self._wanted_bytes(before)
        survey.facts["wanted_bytes"] = wanted
        if wanted < LEAST_HELD_BYTES:
            survey.refuse(
                f"the filesystem at {mount.point} is {before['used_percent']} % full with {before['available_bytes']}"
                " bytes left, as full as asked for or fuller already"
            )
        if wanted > before["available_bytes"]:
            survey.refuse(
                f"bytes {wanted} are asked for and {before['available_bytes']} are available at {mount.point}"
            )
        if mount.kind in block.IN_MEMORY:
            self._check_memory(survey, mount.point, wanted)

    def _survey_kind(self, survey: Survey, mount: block.Mount, directory: str) -> None:
        """Refuse where space cannot be held by an open file, and would not return by itself."""
        if mount.kind in block.NOT_HELD or mount.kind.startswith("fuse"):
            survey.refuse(
                f"the filesystem at {mount.point} is {mount.kind}, where space cannot be held by an unnamed file"
                " (O_TMPFILE with fallocate): fill it on the server's side"
            )
        elif os.statvfs(directory).f_flag & os.ST_RDONLY:
            survey.refuse(f"the filesystem at {mount.point} is read-only")

    def _wanted_bytes(self, before: Dict[str, Any]) -> int:
        capacity = before["used_bytes"] + before["available_bytes"]
        if self.percent is not None:
            return int(capacity * self.percent / 100) - int(before["used_bytes"])
        if self.leave_bytes is not None:
            return int(before["available_bytes"]) - self.leave_bytes
        return self.bytes or 0

    def _check_memory(self, survey: Survey, point: str, wanted: int) -> None:
        survey.refuse(f"the filesystem at {point} is memory: filling it takes RAM", unless="memory_filesystem")
        available = 0
        for line in (read_file("/proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        if available - wanted < MEMORY_RESERVE_BYTES:
            survey.refuse(f"filling {point} would leave {available - wanted} bytes of memory, under the reserve")

    def changes(self, survey: Survey) -> List[Change]:
        facts = survey.facts
        return [HeldFile(facts["directory"], facts["filesystem"], facts["wanted_bytes"])]

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        after = usage(facts["directory"])
        taken = after["used_bytes"] - facts["before"]["used_bytes"]
        if taken < 0.99 * facts["wanted_bytes"] - LEAST_HELD_BYTES:
            raise NoEffect(f"{taken} bytes were taken at {facts['mount']}, of {facts['wanted_bytes']} asked for")
        return {"before": facts["before"], "after": after, "taken_bytes": taken}

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        return {"before": facts["before"], "after": usage(facts["directory"])}


LIMITS = {
    "read_bytes_per_second": ("rbps", "read_bps"),
    "write_bytes_per_second": ("wbps", "write_bps"),
    "read_iops": ("riops", "read_iops"),
    "write_iops": ("wiops", "write_iops"),
}


@fault
@dataclass(frozen=True)
class ThrottleIo(Fault):
    """The cgroup of some processes reads and writes a device at a capped rate."""

    name: ClassVar[str] = "storage.throttle_io"
    declaration: ClassVar[Declaration] = Declaration(
        layer="storage",
        summary="caps a cgroup's bytes or operations per second on a block device",
        reversible="exact",
        takes_effect="now",
        scope="cgroup",
        needs=("root", "cgroup:io"),
        certifies="what a slow disk does to checkpoints and data loading of exactly these processes",
        does_not_certify="a slow disk for everyone, or errors; in cgroup v1 only direct I/O is slowed",
        metrics=(
            "node_disk_write_time_seconds_total",
            "node_disk_written_bytes_total",
            "node_pressure_io_waiting_seconds_total",
        ),
        seen_on=("host", "guest"),
    )

    target: Dict[str, Any] = params.param(target, doc="which processes: their cgroup is what is slowed")
    device: Optional[str] = params.param(params.path(), None, doc="a block device node")
    path: Optional[str] = params.param(params.path(), None, doc="a path on a filesystem on the device")
    read_bytes_per_second: Optional[int] = params.param(params.size_bytes(4096), None)
    write_bytes_per_second: Optional[int] = params.param(params.size_bytes(4096), None)
    read_iops: Optional[int] = params.param(params.integer(1, 10**9), None)
    write_iops: Optional[int] = params.param(params.integer(1, 10**9), None)

    def check(self) -> None:
        params.exactly_one({"device": self.device, "path": self.path})
        if not self._limits():
            raise BadArgument(f"give at least one of {', '.join(LIMITS)}")

    def _limits(self) -> Dict[str, int]:
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def survey(self, survey: Survey) -> None:
        survey.facts["limits"] = self._limits()
        self._survey_device(survey)
        chosen = select(survey, self.target)
        where = hierarchy("io")
        if where is None:
            survey.refuse("no cgroup hierarchy has the io controller (blkio in v1): mount one, or enable it at boot")
            return
        survey.facts["where"] = list(where)
        if where.version == 1:
            survey.warnings.append("cgroup v1: only direct I/O is slowed, buffered writes escape the limit")
        groups = {directory_of(process.pid, "io", where) for process in chosen} - {""}
        pids = {process.pid for process in chosen}
        survey.facts["groups"] = [self._survey_group(survey, group, where, pids) for group in sorted(groups)]
        if chosen and not groups:
            survey.refuse("the chosen processes have ended meanwhile")

    def _survey_device(self, survey: Survey) -> None:
        device = block.device_number(self.device) if self.device else ""
        if self.device and not device:
            survey.refuse(f"device {self.device} is no block device here")
        if self.path:
            try:
                directory = block.directory_of(self.path)
                mount = block.mount_of(directory)
            except OSError as error:
                survey.refuse(f"path {self.path}: {error.strerror}")
                return
            device = block.block_device_of(mount)
            survey.facts["probe_directory"] = directory
            if not device:
                survey.refuse(
                    f"path {self.path} is on {mount.kind}, which has no block device: a limit would do nothing"
                )
        if device:
            survey.facts["device"] = block.whole_disk(device)
            survey.facts["node"] = block.device_node(device)

    def _survey_group(self, survey: Survey, group: str, where: Hierarchy, chosen: Set[int]) -> Dict[str, Any]:
        """What there is to know of one cgroup; refusals for a root, for our own, for limits that someone set."""
        entry: Dict[str, Any] = {"directory": group, "enable_in": "", "inodes": {}}
        inside = _all_members(group)
        if group == where.root:
            there = sorted(chosen & set(members(group)))[:5]
            survey.refuse(f"processes {there} are in the root cgroup, which has no limits: start them in a cgroup")
            return entry
        if inside & set(survey.house.pids):
            survey.refuse(f"cgroup {group} holds chaosgpu's or the caller's own processes: they would be slowed too")
        others = inside - chosen
        if others:
            survey.warnings.append(f"{len(others)} more processes in cgroup {group} are slowed too")
        device = survey.facts.get("device", "")
        if where.version == 1:
            for name in self._limits():
                file = f"{group}/blkio.throttle.{LIMITS[name][1]}_device"
                entry["inodes"][name] = inode_of(file)
                if not entry["inodes"][name]:
                    survey.refuse(f"{file} is not there: the kernel lacks blkio throttling")
                elif throttle(file, device):
                    survey.refuse(f"{file} has a limit for {device} already, set by someone else: remove it first")
            return entry
        entry["inodes"]["io.max"] = inode_of(f"{group}/io.max")
        if entry["inodes"]["io.max"]:
            found = io_max(group, device)
            if found:
                survey.refuse(f"{group}/io.max has a limit for {device} already ({found}): remove it first")
        else:
            entry["enable_in"] = self._survey_controller(survey, group, where)
        return entry

    def _survey_controller(self, survey: Survey, group: str, where: Hierarchy) -> str:
        """The parent in which io can be enabled; "" when that was refused."""
        parent = os.path.dirname(group)
        if "io" not in (read_file(f"{parent}/cgroup.controllers") or "").split():
            survey.refuse(f"{group} has no io.max, and io is not available in {parent}: enable +io from the root down")
        elif parent != where.root and members(parent):
            survey.refuse(f"{group} has no io.max, and {parent} has processes of its own, so +io is impossible there")
        else:
            return parent
        return ""

    def changes(self, survey: Survey) -> List[Change]:
        facts = survey.facts
        changes: List[Change] = []
        for entry in facts["groups"]:
            group = entry["directory"]
            if facts["where"][0] == 1:
                changes += [
                    BlkioThrottle(
                        f"{group}/blkio.throttle.{LIMITS[name][1]}_device",
                        facts["device"],
                        entry["inodes"][name],
                        limit,
                    )
                    for name, limit in self._limits().items()
                ]
                continue
            if entry["enable_in"] and ControllerEnabled(entry["enable_in"], "io") not in changes:
                changes.append(ControllerEnabled(entry["enable_in"], "io"))
            limits = {LIMITS[name][0]: limit for name, limit in self._limits().items()}
            changes.append(IoMax(group, facts["device"], entry["inodes"]["io.max"], limits))
        return changes

    def evidence(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        group = facts["groups"][0]["directory"]
        measured: Dict[str, Any] = {}
        for name, limit in facts["limits"].items():
            rate = io_probe.rate(group, name, limit, facts)
            if rate is None:
                measured[name] = {"asked": limit, "measured": "not exercised"}
                continue
            if rate > 1.25 * limit + io_probe.BLOCK / io_probe.SECONDS:
                raise NoEffect(f"{name} {limit} was asked for and {rate:.0f} was measured in {group}")
            # Below the limit one reader or writer alone is slower than it, or waits behind others in the cgroup.
            measured[name] = {"asked": limit, "measured": round(rate, 1), "reached": rate >= 0.75 * limit}
        return {"cgroup": group, "device": facts["device"], "rates": measured}

    def restored(self, facts: Dict[str, Any], changes: List[Change], grip: Grip) -> Dict[str, Any]:
        limits: Dict[str, Any] = {}
        for change in changes:
            if isinstance(change, (IoMax, BlkioThrottle)):
                limits[change.name()] = change.read(grip) or "none"
        return {"limits": limits}


def _all_members(group: str) -> Set[int]:
    found: Set[int] = set()
    for directory, _, _ in os.walk(group):
        found |= set(members(directory))
    return found
