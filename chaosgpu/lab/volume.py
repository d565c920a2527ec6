"""The checkpoint volume: an ext4 file system in a file, on a loop device, so that storage faults have a disk."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from chaosgpu.lab.commands import run
from chaosgpu.lab.errors import LabError
from chaosgpu.lab.place import Place

SIZE_BYTES = 128 * 1024 * 1024  # sparse: what the job does not write takes no room


@dataclass(frozen=True)
class Mount:
    """A mounted device."""

    device: str  # /dev/loop0
    number: str  # 7:0, as the cgroup files name it


class Volume:
    """The lab's volume, mounted at ``<lab>/checkpoints``."""

    name = "checkpoint volume"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._image = place.directory / "checkpoints.img"

    def mounted(self) -> Mount | None:
        """The device at the mount point; None where there is none."""
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split(" ")
            if fields[4] == str(self._place.checkpoints):
                return Mount(after.split(" ")[1], fields[2])
        return None

    def healthy(self) -> bool:
        """Whether it is mounted and takes writes: the kernel turns a broken ext4 read-only."""
        return self.mounted() is not None and not os.statvfs(self._place.checkpoints).f_flag & os.ST_RDONLY

    def ensure(self, lock: int) -> bool:
        """Make and mount it; True when it was not. What an earlier run left in it stays: the job resumes from it."""
        if self.healthy():
            return False
        if self.mounted():
            raise LabError(f"{self._place.checkpoints} has become read-only after an error: run down, then up")
        if not self._image.exists():
            free = shutil.disk_usage(self._place.directory).free
            if free < SIZE_BYTES:
                raise LabError(
                    f"{self._place.directory} has {free >> 20} MiB free, the checkpoint volume may take "
                    f"{SIZE_BYTES >> 20}: set CHAOSGPU_LAB to a directory with more room"
                )
            new = self._image.with_suffix(".new")
            with new.open("wb") as file:
                file.truncate(SIZE_BYTES)
            # No root-reserved blocks, no lazy initialisation: nothing writes to it but the job.
            run(lock, "mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", new)
            new.rename(self._image)
        self._place.checkpoints.mkdir(exist_ok=True)
        # mount(8) marks the loop device to go with the last user, so a kill at any point leaves none behind.
        run(lock, "mount", "-t", "ext4", "-o", "loop,nosuid,nodev", self._image, self._place.checkpoints)
        return True

    def remove(self, lock: int) -> bool:
        """Unmount it; True when it was mounted. The image goes with the lab's directory."""
        if not self.mounted():
            return False
        if users := _users(self._place.checkpoints):
            raise LabError(f"{self._place.checkpoints} is in use by {', '.join(users)}: end that, then run down again")
        while self.mounted():
            run(lock, "umount", self._place.checkpoints)
        return True


def _users(mount: Path) -> list[str]:
    """Processes that stand in the file system or hold a file of it open."""
    device = mount.stat().st_dev
    users = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = [process / "cwd", process / "root", *(process / "fd").iterdir()]
            if any(link.exists() and link.stat().st_dev == device for link in held):
                users.append(f"{(process / 'comm').read_text(encoding='utf-8').strip()} (pid {process.name})")
        except OSError:
            continue  # it ended meanwhile
    return users
