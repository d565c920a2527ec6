"""The ledger's file format: what is read back after any tear, and what a full disk does to it."""

import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.node import ledger

pytestmark = pytest.mark.unit

PLANNED = {"id": "abc", "request": "r1", "run": "run", "fault": "host.pause_processes", "at": 1.0, "changes": [1, 2]}


def test_lines_survive_a_reload(tmp_path):
    record = ledger.Record.create(str(tmp_path), PLANNED)
    record.append({"line": "applied", "change": 0, "observed": "x"})
    record.append({"line": "active", "result": {}}, durable=True)
    again = ledger.Record.load(record.path)
    assert again.lines == record.lines
    assert again.state == "active"
    assert again.observed() == {0: "x"}
    assert not again.damaged


def test_the_furthest_line_is_the_state(tmp_path):
    record = ledger.Record.create(str(tmp_path), PLANNED)
    for line in ("active", "undoing", "closed"):
        record.append({"line": line})
        assert ledger.Record.load(record.path).state == line


def test_room_is_there_before_it_is_needed(tmp_path):
    record = ledger.Record.create(str(tmp_path), PLANNED)
    size = os.path.getsize(record.path)
    assert os.stat(record.path).st_blocks * 512 >= size  # written, not a hole that a full disk could refuse later
    record.append({"line": "active", "result": {}})
    assert os.path.getsize(record.path) == size
    record.settle()
    assert os.path.getsize(record.path) < size
    assert ledger.Record.load(record.path).state == "active"


@given(cut=st.integers(min_value=0, max_value=2000))
def test_any_tear_of_the_last_write_loses_only_that_line(tmp_path_factory, cut):
    directory = tmp_path_factory.mktemp("ledger")
    record = ledger.Record.create(str(directory), PLANNED)
    before = record._end
    record.append({"line": "active", "result": {"text": "a" * 100}})
    end = record._end
    torn_at = before + cut % (end - before - 1)  # a line that only lacks its newline is whole
    with open(record.path, "r+b") as file:
        file.seek(torn_at)
        file.write(bytes(end - torn_at))
    again = ledger.Record.load(record.path)
    assert again.state == "planned"
    again.append({"line": "undoing", "cause": "test"})
    assert ledger.Record.load(record.path).state == "undoing"


def test_a_bad_first_line_is_damage_and_an_empty_file_is_nothing(tmp_path):
    record = ledger.Record.create(str(tmp_path), PLANNED)
    record.append({"line": "active", "result": {}})
    with open(record.path, "r+b") as file:
        file.write(b"XXXX")
    assert ledger.Record.load(record.path).damaged
    (tmp_path / "zeros.record").write_bytes(bytes(4096))
    assert [found.id for found in ledger.read_all(str(tmp_path))] == ["abc"]
    assert (tmp_path / "zeros.record").exists()  # it may be one that a keeper is writing just now
    ledger.drop_empty(str(tmp_path))
    assert not (tmp_path / "zeros.record").exists()


def test_a_flipped_bit_is_noticed(tmp_path):
    record = ledger.Record.create(str(tmp_path), PLANNED)
    record.append({"line": "active", "result": {"a": 1}})
    content = bytearray((tmp_path / "abc.record").read_bytes())
    content[content.rindex(b'"a":1') + 4] ^= 1
    (tmp_path / "abc.record").write_bytes(content)
    assert ledger.Record.load(record.path).state == "planned"


def test_the_line_format_is_crc_and_json():
    line = ledger._line({"line": "active"})
    checksum, body = line.rstrip(b"\n").split(b" ", 1)
    assert int(checksum, 16) == zlib.crc32(body)


def test_nothing_is_left_of_a_record_that_cannot_be_written(tmp_path):
    with pytest.raises(ChaosgpuError, match="CHAOSGPU_STATE"):
        ledger.Record.create(str(tmp_path / "gone"), PLANNED)


def test_only_the_newest_closed_records_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "KEEP_CLOSED", 2)
    for number in range(4):
        record = ledger.Record.create(str(tmp_path), {**PLANNED, "id": f"id{number}", "at": float(number)})
        record.append({"line": "closed"})
    records = list(ledger.read_all(str(tmp_path)))
    ledger.prune(records)
    assert [record.id for record in records] == ["id2", "id3"]
    assert sorted(os.listdir(tmp_path)) == ["id2.record", "id3.record"]
