"""Limits of cgroup v1 on a loop device. Those of v2 are tried in the guest."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from drive import by_hand, copied, undone_elsewhere

from chaosgpu.changes import base
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.file_value import inode_of
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.io_limit import BlkioThrottle, throttle

GRIP = Grip("0123")


@pytest.fixture
def device(tmp_path):
    image = tmp_path / "image"
    subprocess.run(["truncate", "-s", "64M", image], check=True)
    argv = ["losetup", "--find", "--show", image]
    node = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    number = os.stat(node).st_rdev
    yield f"{os.major(number)}:{os.minor(number)}"
    subprocess.run(["losetup", "--detach", node], check=True)


@pytest.fixture
def group():
    made = Path(f"/sys/fs/cgroup/blkio/chaosgpu-test-{os.getpid()}")
    made.mkdir()
    yield made
    made.rmdir()


def limit(group, device, value=1000000):
    file = f"{group}/blkio.throttle.write_bps_device"
    return BlkioThrottle(file, device, inode_of(file), value)


def test_set_and_taken_back(group, device):
    change = limit(group, device)
    file = Path(change.file)
    assert not change.holds(GRIP)
    assert change.apply(GRIP) == 1000000
    assert file.read_text() == f"{device} 1000000\n"
    assert change.holds(GRIP)
    assert copied(change) == change
    assert undone_elsewhere(change, 1000000).verdict == base.RESTORED
    assert file.read_text() == ""
    assert change.undo(1000000, GRIP).verdict == base.ALREADY


def test_without_a_record_of_it_it_is_taken_back(group, device):
    change = limit(group, device)
    change.apply(GRIP)
    assert change.undo(None, GRIP).verdict == base.RESTORED


def test_what_someone_else_set_is_left(group, device):
    change = limit(group, device)
    change.apply(GRIP)
    Path(change.file).write_text(f"{device} 7000\n")
    assert change.undo(1000000, GRIP).verdict == base.SUPERSEDED
    assert throttle(change.file, device) == 7000
    with pytest.raises(Moved, match="is 7000 now"):
        change.apply(GRIP)


def test_other_devices_keep_their_limits(group, device):
    disk = next(
        Path(f"/sys/block/{name}/dev").read_text().strip()
        for name in os.listdir("/sys/block")
        if Path(f"/sys/block/{name}/dev").read_text().strip() != device
    )
    change = limit(group, device)
    Path(change.file).write_text(f"{disk} 5000000\n")
    change.apply(GRIP)
    change.undo(1000000, GRIP)
    assert Path(change.file).read_text() == f"{disk} 5000000\n"


def test_another_cgroup_of_that_name_is_lost(group, device):
    change = limit(group, device)
    change.apply(GRIP)
    group.rmdir()
    assert change.undo(1000000, GRIP).verdict == base.LOST
    for _ in range(200):  # the kernel gives the least number that is free
        group.mkdir()
        if inode_of(change.file) != change.inode:
            break
        group.rmdir()
        time.sleep(0.01)
    Path(change.file).write_text(f"{device} 1000000\n")
    assert change.undo(1000000, GRIP).verdict == base.LOST
    assert throttle(change.file, device) == 1000000


def test_a_device_that_is_not_there_is_an_error(group):
    with pytest.raises(ChangeFailed, match="does not take"):
        limit(group, "4095:4095").apply(GRIP)


def test_the_lines_by_hand(group, device):
    change = limit(group, device)
    by_hand(change.describe().apply)
    assert change.holds(GRIP)
    by_hand(change.describe().undo)
    assert not change.holds(GRIP)
