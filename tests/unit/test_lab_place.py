"""The lab's record and its lock."""

import subprocess
import threading

import pytest

from chaosgpu.lab.errors import LabError
from chaosgpu.lab.place import Place, Record


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    monkeypatch.setenv("CHAOSGPU_LAB", str(tmp_path / "lab"))
    return Place()


def test_no_lab_is_an_empty_record(place) -> None:
    assert place.load() == Record()


def test_record_comes_back_as_it_was_saved(place) -> None:
    place.directory.mkdir()
    record = Record({"prometheus": 9490}, ["/a/lab", "/a/lab/rank0"], {"/a": ["io"]}, "no ip")
    place.save(record)
    assert place.load() == record


def test_record_of_another_version_is_refused_in_one_line(place) -> None:
    place.directory.mkdir()
    (place.directory / "record.json").write_text('{"schema": 99}')
    with pytest.raises(LabError, match="another version") as error:
        place.load()
    assert "\n" not in str(error.value)


def test_a_child_keeps_the_lock_after_its_parent(place) -> None:
    """What a killed `up` started must be done before the next command looks."""
    with place.locked(lambda: None) as lock:
        done = place.directory / "done"
        child = subprocess.Popen(["sh", "-c", f"sleep 0.5; touch '{done}'"], stdin=lock)
    waited = []
    with place.locked(lambda: waited.append(True)):
        assert done.exists()
    assert waited == [True]
    assert child.wait(10) == 0


def test_who_waits_while_the_lab_is_deleted_gets_a_lock_that_guards(place) -> None:
    waits, got = threading.Event(), threading.Event()

    def next_one() -> None:
        with place.locked(waits.set):
            assert place.directory.exists()
            got.set()

    with place.locked(lambda: None):
        thread = threading.Thread(target=next_one)
        thread.start()
        assert waits.wait(10)
        place.delete()
    thread.join(10)
    assert got.is_set()


def test_a_place_that_cannot_be_written_is_one_line(monkeypatch) -> None:
    monkeypatch.setenv("CHAOSGPU_LAB", "/proc/lab")
    with pytest.raises(LabError, match="cannot write in /proc/lab"), Place().locked(lambda: None):
        pass
