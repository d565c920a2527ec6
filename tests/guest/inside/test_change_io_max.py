"""io.max of cgroup v2 on a disk, the change by itself."""

import os
from pathlib import Path

import pytest
from drive import by_hand, copied, undone_elsewhere

from chaosgpu.changes.base import ALREADY, LOST, RESTORED, SUPERSEDED
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.file_value import inode_of
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.io_limit import IoMax, io_max

ROOT = Path("/sys/fs/cgroup")
DISK = Path("/sys/block/vda/dev").read_text().strip() if os.path.exists("/sys/block/vda") else ""
OTHER = Path("/sys/block/nvme0n1/dev").read_text().strip() if os.path.exists("/sys/block/nvme0n1") else ""
LIMITS = {"wbps": 1048576, "riops": 50}


@pytest.fixture
def grip():
    return Grip("0123")


@pytest.fixture
def group():
    (ROOT / "cgroup.subtree_control").write_text("+io")
    made = ROOT / "limited"
    made.mkdir()
    yield made
    made.rmdir()
    (ROOT / "cgroup.subtree_control").write_text("-io")


def limit(group, device=DISK):
    return IoMax(str(group), device, inode_of(f"{group}/io.max"), LIMITS)


def test_keys_that_were_not_asked_for_stay_max_and_others_disks_too(group, grip):
    (group / "io.max").write_text(f"{OTHER} rbps=5000000")
    change = limit(group)
    assert change.apply(grip) == LIMITS
    lines = (group / "io.max").read_text().splitlines()
    assert sorted(lines) == sorted(
        [f"{DISK} rbps=max wbps=1048576 riops=50 wiops=max", f"{OTHER} rbps=5000000 wbps=max riops=max wiops=max"]
    )
    assert change.holds(grip)
    assert copied(change) == change
    assert undone_elsewhere(change, LIMITS).verdict == RESTORED
    assert (group / "io.max").read_text() == f"{OTHER} rbps=5000000 wbps=max riops=max wiops=max\n"
    assert change.undo(LIMITS, grip).verdict == ALREADY


def test_without_a_record_of_it_it_is_taken_back(group, grip):
    limit(group).apply(grip)
    assert limit(group).undo(None, grip).verdict == RESTORED


def test_what_someone_else_set_is_left(group, grip):
    change = limit(group)
    change.apply(grip)
    (group / "io.max").write_text(f"{DISK} wbps=7000000")
    assert change.undo(LIMITS, grip).verdict == SUPERSEDED
    assert io_max(str(group), DISK) == {"wbps": 7000000, "riops": 50}
    with pytest.raises(Moved, match="7000000"):
        change.apply(grip)


def test_another_cgroup_of_that_name_is_lost(group, grip):
    change = limit(group)
    change.apply(grip)
    group.rmdir()
    assert change.undo(LIMITS, grip).verdict == LOST
    group.mkdir()
    assert inode_of(f"{group}/io.max") != change.inode
    assert change.undo(LIMITS, grip).verdict == LOST


def test_a_device_that_is_not_there_is_an_error(group, grip):
    with pytest.raises(ChangeFailed, match="does not take"):
        limit(group, "4095:4095").apply(grip)


def test_the_lines_by_hand(group, grip):
    change = limit(group)
    by_hand(change.describe().apply)
    assert change.holds(grip)
    by_hand(change.describe().undo)
    assert not change.holds(grip)
