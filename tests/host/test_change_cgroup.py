"""Cgroups made, filled, limited and emptied again, in one of our own below the root that has the CPU controller."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from drive import by_hand, copied, undone_elsewhere
from victims import until

from chaosgpu.changes.base import ALREADY, LOST, REMOVED, RESTORED, SUPERSEDED, start_time_ticks
from chaosgpu.changes.cgroup import ChildCgroup, MovedProcesses, members, members_below
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.file_value import FileValue, inode_of
from chaosgpu.changes.grip import Grip
from chaosgpu.faults.cgroups import hierarchy


@pytest.fixture
def grip():
    return Grip("test")


@pytest.fixture
def ground():
    """A cgroup that this test owns; whatever is left in it goes with it."""
    made = Path(hierarchy("cpu").root) / f"chaosgpu-test-{os.getpid()}"
    made.mkdir()
    yield made
    for directory, _, _ in os.walk(made, topdown=False):
        for pid in members(directory):
            os.kill(pid, 9)
        assert until(lambda where=directory: emptied(where)), f"{directory} is left"


def emptied(directory):
    try:
        os.rmdir(directory)
    except OSError:
        return False
    return True


@pytest.fixture
def home(ground):
    made = ground / "home"
    made.mkdir()
    return made


def put(child, where):
    (where / "cgroup.procs").write_text(str(child.pid))
    return child


def moving(home, into, *children):
    old = {str(child.pid): [start_time_ticks(child.pid), str(home)] for child in children}
    return MovedProcesses(str(into), str(home), old)


def test_a_child_is_made_and_removed(ground, grip):
    change = copied(ChildCgroup(str(ground / "chaosgpu-abc")))
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert change.holds(grip)
    with pytest.raises(Moved, match="exists already"):
        change.apply(grip)
    assert undone_elsewhere(change, observed).verdict == REMOVED
    assert not (ground / "chaosgpu-abc").exists()
    assert change.undo(observed, grip).verdict == ALREADY


def test_what_was_made_inside_a_child_goes_with_it(ground, grip):
    change = ChildCgroup(str(ground / "chaosgpu-abc"))
    change.apply(grip)
    (ground / "chaosgpu-abc" / "deeper").mkdir()
    assert change.undo(True, grip).verdict == REMOVED
    assert not change.holds(grip)


def test_a_child_with_processes_in_it_stays_and_says_who(ground, sleeper, grip):
    change = ChildCgroup(str(ground / "chaosgpu-abc"))
    change.apply(grip)
    put(sleeper, ground / "chaosgpu-abc")
    with pytest.raises(ChangeFailed, match=f"cannot be removed: .*{sleeper.pid}"):
        change.undo(True, grip)
    put(sleeper, ground)


def test_a_child_that_cannot_be_made_is_told(ground, grip):
    with pytest.raises(ChangeFailed, match="cannot be made: No such file"):
        ChildCgroup(str(ground / "gone" / "chaosgpu-abc")).apply(grip)


def test_processes_go_and_come_back_with_what_was_born_inside(ground, home, spawn, grip):
    into = ground / "chaosgpu-abc"
    into.mkdir()
    family = put(spawn("sh", "-c", "read x; sleep 600 & echo $!; wait", stdin=True), home)
    change = copied(moving(home, into, family))
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert observed == members(into) == [family.pid]
    assert members(home) == []
    family.stdin.write("go\n")
    family.stdin.flush()
    child = int(family.stdout.readline())
    (into / "deeper").mkdir()
    (into / "deeper" / "cgroup.procs").write_text(str(child))
    assert change.holds(grip)
    assert undone_elsewhere(change, observed).verdict == RESTORED
    assert sorted(members(home)) == sorted([family.pid, child])
    assert members_below(into) == []
    assert change.undo(observed, grip).verdict == ALREADY


def test_processes_are_sent_back_each_to_its_own_cgroup(ground, home, spawn, grip):
    other, into = ground / "other", ground / "chaosgpu-abc"
    other.mkdir()
    into.mkdir()
    first, second = put(spawn("sleep", "600"), home), put(spawn("sleep", "600"), other)
    old = {str(first.pid): [start_time_ticks(first.pid), str(home)]}
    old[str(second.pid)] = [start_time_ticks(second.pid), str(other)]
    change = MovedProcesses(str(into), str(home), old)
    observed = change.apply(grip)
    assert change.undo(observed, grip).verdict == RESTORED
    assert (members(home), members(other)) == ([first.pid], [second.pid])


def test_who_was_moved_on_by_someone_else_is_left_and_named(ground, home, sleeper, grip):
    into, elsewhere = ground / "chaosgpu-abc", ground / "elsewhere"
    into.mkdir()
    elsewhere.mkdir()
    put(sleeper, home)
    change = moving(home, into, sleeper)
    observed = change.apply(grip)
    put(sleeper, elsewhere)
    verdict, detail = undone_elsewhere(change, observed)
    assert verdict == SUPERSEDED
    assert str(sleeper.pid) in detail
    assert members(elsewhere) == [sleeper.pid]


def test_a_home_that_is_gone_is_told_and_the_process_is_free(ground, home, sleeper, grip):
    into = ground / "chaosgpu-abc"
    into.mkdir()
    put(sleeper, home)
    change = moving(home, into, sleeper)
    observed = change.apply(grip)
    home.rmdir()
    verdict, detail = undone_elsewhere(change, observed)
    assert verdict == LOST
    assert str(ground) in detail
    assert members(ground) == [sleeper.pid]


def test_ended_processes_are_not_moved(ground, home, sleeper, grip):
    into = ground / "chaosgpu-abc"
    into.mkdir()
    change = moving(home, into, sleeper)
    namesake = MovedProcesses(str(into), str(home), {str(sleeper.pid): [start_time_ticks(sleeper.pid) + 1, str(home)]})
    with pytest.raises(Moved, match="have ended"):
        namesake.apply(grip)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(Moved, match="have ended"):
        change.apply(grip)
    assert change.undo(None, grip).verdict == ALREADY


def test_the_lines_for_an_operator(ground, home, sleeper, grip):
    put(sleeper, home)
    child = ChildCgroup(str(ground / "chaosgpu-abc"))
    change = moving(home, ground / "chaosgpu-abc", sleeper)
    for line in (child.describe().apply, change.describe().apply):
        by_hand(line)
    assert members(ground / "chaosgpu-abc") == [sleeper.pid]
    for line in (change.describe().undo, child.describe().undo):
        by_hand(line)
    assert members(home) == [sleeper.pid]
    assert not child.holds(grip)


# --- a value in a kernel file, in the same cgroup: one that every cgroup has


def setting(home, wanted="1"):
    if hierarchy("cpu").version == 2:
        file, old = home / "cgroup.max.depth", "max"
    else:
        file, old = home / "notify_on_release", "0"
    assert file.read_text().strip() == old
    return FileValue(str(file), old, wanted, inode_of(str(file)), f"cgroup:{home}")


def test_a_value_is_set_and_put_back(home, grip):
    change = copied(setting(home))
    assert not change.holds(grip)
    assert change.apply(grip) == "1"
    assert Path(change.path).read_text() == "1\n"
    assert change.holds(grip)
    assert undone_elsewhere(change, "1").verdict == RESTORED
    assert Path(change.path).read_text().strip() == change.old
    assert change.undo("1", grip).verdict == ALREADY


def test_a_value_without_a_record_of_its_apply_is_put_back(home, grip):
    change = setting(home)
    change.apply(grip)
    assert undone_elsewhere(change, None).verdict == RESTORED


def test_a_value_that_moved_before_or_meanwhile_is_left_alone(home, grip):
    """What is set while nobody looks is someone's: neither overwritten nor put back."""
    if hierarchy("cpu").version == 1:
        change = FileValue(str(home / "cpu.shares"), "1024", "512", inode_of(str(home / "cpu.shares")), "cgroup:x")
        others = "256"
    else:
        change, others = setting(home), "7"
    Path(change.path).write_text(others)
    with pytest.raises(Moved, match=f"is '{others}' now and was '{change.old}'"):
        change.apply(grip)
    Path(change.path).write_text(change.old)
    observed = change.apply(grip)
    Path(change.path).write_text(others)
    verdict, detail = change.undo(observed, grip)
    assert verdict == SUPERSEDED
    assert others in detail
    assert Path(change.path).read_text().strip() == others


def test_the_file_of_a_cgroup_made_anew_is_another(home, grip):
    change = setting(home)
    observed = change.apply(grip)
    home.rmdir()
    assert undone_elsewhere(change, observed).verdict == LOST
    home.mkdir()
    Path(change.path).write_text("1")
    assert undone_elsewhere(change, observed).verdict == LOST
    assert Path(change.path).read_text() == "1\n"
    assert not change.holds(grip)
    with pytest.raises(Moved, match="another file"):
        change.apply(grip)


def test_a_value_that_the_kernel_refuses_is_told(home, grip):
    change = setting(home, wanted="many words")
    with pytest.raises(ChangeFailed, match="does not take 'many words'"):
        change.apply(grip)
    assert not change.holds(grip)


def test_the_lines_for_an_operator_set_the_value(home, grip):
    change = setting(home)
    by_hand(change.describe().apply)
    assert change.holds(grip)
    by_hand(change.describe().undo)
    assert not change.holds(grip)


def test_a_cap_holds_what_is_moved_under_it(ground, home, busy, grip):
    """The three together, as a slowed process has them; the kernel counts the periods that were cut short."""
    if hierarchy("cpu").version == 2:
        for group in (ground.parent, ground):
            (group / "cgroup.subtree_control").write_text("+cpu")
    put(busy, home)
    into = ground / "chaosgpu-abc"
    name, old, wanted = ("cpu.max", "max 100000", "20000 100000")
    if hierarchy("cpu").version == 1:
        name, old, wanted = ("cpu.cfs_quota_us", "-1", "20000")
    changes = [
        ChildCgroup(str(into)),
        FileValue(str(into / name), old, wanted, 0, f"cgroup:{into}"),
        moving(home, into, busy),
    ]
    observed = [change.apply(grip) for change in changes]
    time.sleep(0.5)
    counted = dict(line.split() for line in (into / "cpu.stat").read_text().splitlines())
    assert int(counted["nr_throttled"]) > 0
    for change, seen in reversed(list(zip(changes, observed, strict=True))):
        assert undone_elsewhere(change, seen).verdict in (RESTORED, REMOVED)
    assert members(home) == [busy.pid]
    assert subprocess.run(["ps", "-o", "stat=", "-p", str(busy.pid)], capture_output=True, text=True).stdout[0] == "R"
