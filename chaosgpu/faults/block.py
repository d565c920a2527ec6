"""Filesystems and the devices below them: what a path lies on, and which of it this machine cannot do without."""

import errno
import os
import re
from typing import Dict, List, NamedTuple, Set

from chaosgpu.changes.file_value import read_file
from chaosgpu.faults.base import House

VITAL = ("/", "/usr", "/var", "/var/log", "/etc", "/boot", "/run", "/tmp", "/dev")
KUBELET = ("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/docker", "/var/lib/containers")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
# No unnamed file there, or no allocation without writing: space would not be held, or not return with its holder.
NOT_HELD = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "vfat", "exfat", "ntfs3", "zfs")


class Mount(NamedTuple):
    """One line of mountinfo (proc(5)). ``device`` is MAJ:MIN as the kernel numbers the filesystem."""

    number: str
    device: str
    point: str
    kind: str
    source: str


def mounts() -> List[Mount]:
    """The mounts of this mount namespace, in the order they were made."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.rstrip("\n").partition(" - ")
            fields, tail = before.split(), after.split()
            source = _plain(tail[1]) if len(tail) > 1 else ""
            found.append(Mount(fields[0], fields[2], _plain(fields[4]), tail[0], source))
    return found


def _plain(escaped: str) -> str:
    """Undo mountinfo's octal escapes of blank, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), escaped)


def mount_of(path: str) -> Mount:
    """The mount that a path lies on, also below one that hides others. Raises OSError when the path is not there."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        opened = read_file(f"/proc/self/fdinfo/{fd}") or ""
    finally:
        os.close(fd)
    number = next(line.split()[1] for line in opened.splitlines() if line.startswith("mnt_id:"))
    for mount in mounts():
        if mount.number == number:
            return mount
    raise FileNotFoundError(errno.ENOENT, "it lies on a mount outside this mount namespace")


def directory_of(path: str) -> str:
    """The directory that a path is, or that holds the file which it is, behind every symbolic link. Raises OSError."""
    real = os.path.realpath(path)
    os.stat(real)
    return real if os.path.isdir(real) else os.path.dirname(real)


def device_number(path: str) -> str:
    """MAJ:MIN of a block device node; "" when the path is no block device."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    is_block = (found.st_mode & 0o170000) == 0o060000
    return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" if is_block else ""


def filesystem_of(path: str) -> str:
    """MAJ:MIN that stat(2) gives for files on the path's filesystem."""
    found = os.stat(path).st_dev
    return f"{os.major(found)}:{os.minor(found)}"


def block_device_of(mount: Mount) -> str:
    """MAJ:MIN of the block device a filesystem is mounted from; "" when there is none (NFS, FUSE, overlay, tmpfs)."""
    if os.path.isdir(f"/sys/dev/block/{mount.device}"):
        return mount.device
    return device_number(mount.source)  # btrfs and others number their filesystems apart from the device


def whole_disk(device: str) -> str:
    """The disk of a partition, else the device itself: limits are set on whole disks (cgroup-v2.rst, io.max)."""
    place = os.path.realpath(f"/sys/dev/block/{device}")
    if os.path.exists(f"{place}/partition"):
        return read_file(f"{os.path.dirname(place)}/dev") or device
    return device


def images(device: str) -> Set[str]:
    """The filesystems (st_dev) whose files a device is made of: loop devices at any depth below mappings and disks."""
    seen: Set[str] = set()
    found: Set[str] = set()
    below = [device]
    while below:
        current = below.pop()
        if current in seen or not current:
            continue
        seen.add(current)
        place = os.path.realpath(f"/sys/dev/block/{current}")
        below.append(whole_disk(current))
        if os.path.isdir(f"{place}/slaves"):
            below += [read_file(f"{place}/slaves/{name}/dev") or "" for name in os.listdir(f"{place}/slaves")]
        backing = read_file(f"{place}/loop/backing_file")
        if backing and os.path.exists(backing):
            filesystem = filesystem_of(backing)
            found.add(filesystem)
            below.append(filesystem)
    return found


def device_node(device: str) -> str:
    """The node in /dev of a device; "" when there is none (no udev, a container)."""
    uevent = read_file(f"/sys/dev/block/{device}/uevent") or ""
    name = next((line.partition("=")[2] for line in uevent.splitlines() if line.startswith("DEVNAME=")), "")
    return f"/dev/{name}" if name and device_number(f"/dev/{name}") == device else ""


def vital_filesystems(house: House) -> Dict[str, str]:
    """Filesystems (st_dev as MAJ:MIN) that the machine or chaosgpu lives on, each with the reason."""
    reasons: Dict[str, str] = {}
    for path in VITAL:
        _note(reasons, path, f"{path} is on it")
    _note(reasons, house.state_dir, "chaosgpu's ledger is on it")
    _note(reasons, os.path.realpath(house.interpreter), "chaosgpu's interpreter is on it")
    for line in (read_file("/proc/swaps") or "").splitlines()[1:]:
        _note(reasons, _plain(line.split()[0]), "a swap file is on it")
    return reasons


def kubelet_filesystems() -> Dict[str, str]:
    """Filesystems whose filling makes the kubelet evict pods."""
    reasons: Dict[str, str] = {}
    for path in KUBELET:
        _note(reasons, path, f"{path} is on it, and the kubelet evicts pods when it is full")
    return reasons


def _note(reasons: Dict[str, str], path: str, why: str) -> None:
    """Note the filesystem of a path, and those which hold the image that it is mounted from."""
    try:
        filesystem, device = filesystem_of(path), block_device_of(mount_of(path))
    except OSError:
        return  # there is no such path here
    reasons.setdefault(filesystem, why)
    for below in images(device):
        reasons.setdefault(below, f"{why}, in an image file")
