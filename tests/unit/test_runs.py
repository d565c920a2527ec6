"""The run file: written before the first send, whole or not at all, and found again."""

import json
import os

import pytest

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.fleet import runs


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a home with blanks"))
    return tmp_path / "a home with blanks"


def test_what_is_remembered_is_recalled():
    path = runs.remember("r1", ["b", "a"], "local")
    told = runs.recall("r1")
    assert (told["run"], told["nodes"], told["transport"], told["pid"]) == ("r1", ["a", "b"], "local", os.getpid())
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["r1.json"]


def test_nodes_are_added_and_the_start_stays():
    runs.remember("r1", ["a"], "local")
    begun = runs.recall("r1")["started_at"]
    runs.remember("r1", ["b"], "local")
    assert runs.recall("r1")["nodes"] == ["a", "b"]
    assert runs.recall("r1")["started_at"] == begun


def test_the_newest_is_the_one_remembered_last():
    for number, run in enumerate(("zz", "aa")):
        os.utime(runs.remember(run, ["local"], "local"), (number, number))
    assert runs.newest() == "aa"


def test_no_run_is_an_error_that_says_what_to_do():
    with pytest.raises(ChaosgpuError, match="chaos gpu revert --all"):
        runs.newest()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\x00"])
def test_a_torn_file_is_an_unknown_run(content):
    runs.remember("r1", ["local"], "local").write_text(content)
    assert runs.recall("r1") == {}
    runs.remember("r1", ["local"], "local")
    assert json.loads((runs.directory() / "r1.json").read_text())["nodes"] == ["local"]


def test_only_the_newest_are_kept():
    for number in range(runs.KEEP + 5):
        os.utime(runs.remember(f"r{number}", ["local"], "local"), (number, number))
    kept = {path.stem for path in runs.directory().glob("*.json")}
    assert len(kept) == runs.KEEP
    assert "r0" not in kept
    assert f"r{runs.KEEP + 4}" in kept


def test_where_it_cannot_be_written_no_fault_is_started(home):
    home.mkdir()
    (home / "chaosgpu").write_text("a file in the way")
    with pytest.raises(ChaosgpuError, match="no fault is started: free space there or set XDG_STATE_HOME"):
        runs.remember("r1", ["local"], "local")


def test_one_run_for_the_life_of_the_process():
    assert runs.this_run() == runs.this_run()
