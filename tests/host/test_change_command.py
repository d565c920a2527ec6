"""A command with its inverse, on a directory."""

import pytest
from drive import by_hand, copied, undone_elsewhere

from chaosgpu.changes import base
from chaosgpu.changes.command import Command
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip


@pytest.fixture
def thing(tmp_path):
    return tmp_path / "chaosgpu 0123"


@pytest.fixture
def change(thing):
    return Command(
        "a directory", f"path:{thing}", ["mkdir", str(thing)], ["rmdir", str(thing)], ["test", "-d", str(thing)]
    )


def test_it_is_made_and_removed(thing, change):
    grip = Grip("0123")
    assert change.apply(grip) is True
    assert thing.is_dir()
    assert change.holds(grip)
    assert copied(change) == change
    assert undone_elsewhere(change, True).verdict == base.REMOVED
    assert not thing.exists()
    assert change.undo(True, grip).verdict == base.ALREADY


def test_the_lines_by_hand(thing, change):
    by_hand(change.describe().apply)
    assert thing.is_dir()
    by_hand(change.describe().undo)
    assert not thing.exists()


def test_what_is_there_already_is_not_ours(thing, change):
    thing.mkdir()
    with pytest.raises(Moved, match="exists already"):
        change.apply(Grip("0123"))


def test_an_undo_that_fails_says_so(thing, change):
    change.apply(Grip("0123"))
    (thing / "in the way").touch()
    with pytest.raises(ChangeFailed, match="not empty"):
        change.undo(True, Grip("0123"))


def test_what_it_made_is_looked_for(thing):
    idle = Command("a directory", "path:x", ["true"], ["true"], ["test", "-d", str(thing)])
    with pytest.raises(ChangeFailed, match="is not there"):
        idle.apply(Grip("0123"))


def test_a_missing_command_is_named(thing):
    with pytest.raises(ChangeFailed, match="no-such-command"):
        Command("x", "path:x", ["no-such-command"], ["true"], ["false"]).apply(Grip("0123"))
