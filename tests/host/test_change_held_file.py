"""HeldFile on a real filesystem: what it takes, gives back, and does when its holder is killed."""

import os
import subprocess

import pytest
from drive import by_hand, held_elsewhere, undone_elsewhere

from chaosgpu.changes import base
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.held_file import HeldFile
from chaosgpu.faults import block

MIB = 1024**2


@pytest.fixture
def volume(tmp_path):
    image, point = tmp_path / "image", tmp_path / "point"
    point.mkdir()
    subprocess.run(["truncate", "-s", "200M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    yield str(point)
    subprocess.run(["umount", point], check=True)


def available(directory):
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def held(directory, size_bytes):
    return HeldFile(directory, block.filesystem_of(directory), size_bytes)


def test_blocks_are_taken_and_return(volume):
    before, grip = available(volume), Grip("0123")
    change = held(volume, 50 * MIB)
    assert not change.holds(grip)
    assert change.apply(grip) == {"bytes": 50 * MIB}
    assert change.holds(grip)
    assert abs(before - available(volume) - 50 * MIB) < MIB
    assert os.listdir(volume) == ["lost+found"]
    assert change.undo({"bytes": 50 * MIB}, grip).verdict == base.REMOVED
    assert available(volume) == before
    assert not change.holds(grip)
    assert change.undo(None, grip).verdict == base.ALREADY


def test_more_than_there_is_takes_all_there_is(volume):
    grip = Grip("0123")
    taken = held(volume, 10**12).apply(grip)["bytes"]
    assert 100 * MIB < taken < 200 * MIB
    assert available(volume) < MIB
    grip.close()
    assert available(volume) > 100 * MIB


def test_the_blocks_return_when_the_holder_is_killed(volume, spawn):
    before, change = available(volume), held(volume, 50 * MIB)
    holder = held_elsewhere(spawn, change)
    assert available(volume) < before - 49 * MIB
    holder.kill()
    holder.wait()
    assert available(volume) == before
    assert undone_elsewhere(change, {"bytes": 50 * MIB}).verdict == base.ALREADY


def test_another_filesystem_at_the_same_path_is_not_filled(volume):
    change = held(volume, 10 * MIB)
    subprocess.run(["mount", "-t", "tmpfs", "none", volume], check=True)
    with pytest.raises(Moved, match="another filesystem"):
        change.apply(Grip("0123"))
    subprocess.run(["umount", volume], check=True)


def test_a_filesystem_without_unnamed_files_is_an_error():
    with pytest.raises(ChangeFailed, match="takes no unnamed file"):
        held("/proc", MIB).apply(Grip("0123"))


def test_the_line_by_hand_takes_as_much_and_gives_it_back(volume):
    before, lines = available(volume), held(volume, 50 * MIB).describe()
    by_hand(lines.apply)
    assert abs(before - available(volume) - 50 * MIB) < MIB
    by_hand(lines.undo)
    assert available(volume) == before
