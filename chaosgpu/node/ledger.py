"""The ledger: one file an injection, durable ahead of every change, readable after any crash.

A record is a run of lines, each a CRC-32 and a JSON object, written into a file that was filled with zeros first, so
that no later line can fail for want of space. Lines: ``planned`` (everything the undo needs), ``applied`` (what was
read back after one change), ``active``, ``undoing``, ``closed``. Only the keeper writes here.
"""

import json
import os
import zlib
from typing import Any, Dict, List, Optional

from chaosgpu.changes.errors import ChaosgpuError

SCHEMA = 1
SUFFIX = ".record"
KEEP_CLOSED = 1000
_ROOM = 16 * 1024  # for the lines after ``planned`` of a small fault; a large one gets as much again as it has


def _line(document: Dict[str, Any]) -> bytes:
    body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> Optional[Dict[str, Any]]:
    checksum, _, body = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


class Record:
    """One injection's file. ``lines`` are the valid ones, in order; ``damaged``: the first is not among them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id = os.path.basename(path)[: -len(SUFFIX)]
        self.lines: List[Dict[str, Any]] = []
        self.damaged = False
        self._end = 0

    @classmethod
    def create(cls, directory: str, planned: Dict[str, Any]) -> "Record":
        """Write ``planned`` durably (file and directory fsynced), or leave nothing behind and raise ChaosgpuError."""
        record = cls(os.path.join(directory, planned["id"] + SUFFIX))
        line = _line({"line": "planned", "schema": SCHEMA, **planned})
        try:
            fd = os.open(record.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, bytes(2 * len(line) + _ROOM), 0)
                _write_all(fd, line, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(directory)
        except OSError as error:
            try:
                os.unlink(record.path)
            except OSError:
                pass  # zero-filled or torn: read as invalid and deleted at the next start
            raise ChaosgpuError(
                f"the ledger in {directory} cannot be written ({error.strerror}), so no fault is started:"
                " free space there or set CHAOSGPU_STATE"
            ) from None
        record.lines.append({"line": "planned", "schema": SCHEMA, **planned})
        record._end = len(line)
        return record

    @classmethod
    def load(cls, path: str) -> "Record":
        record = cls(path)
        with open(path, "rb") as file:
            content = file.read()
        used = content.rstrip(b"\0")
        record._end = len(used)
        for number, line in enumerate(used.split(b"\n")):
            document = _parse(line)
            if document is not None:
                record.lines.append(document)
            elif number == 0:
                record.damaged = True
        record.damaged = record.damaged and bool(record.lines)
        return record

    def append(self, document: Dict[str, Any], durable: bool = False) -> None:
        """Add a line: a plain write survives our own death; ``durable`` (fsync) also the machine's. Raises OSError."""
        line = _line(document)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if self._end and os.pread(fd, 1, self._end - 1) != b"\n":
                line = b"\n" + line  # a torn line stays alone on its own
            _write_all(fd, line, self._end)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        self._end += len(line)
        self.lines.append(document)

    def settle(self) -> None:
        """Give the unused room back once nothing more will be written. Best effort: the file may have been removed."""
        try:
            os.truncate(self.path, self._end)
        except OSError:
            pass

    def last(self, kind: str) -> Optional[Dict[str, Any]]:
        return next((line for line in reversed(self.lines) if line.get("line") == kind), None)

    @property
    def planned(self) -> Dict[str, Any]:
        return self.lines[0]

    @property
    def state(self) -> str:
        """planned, active, undoing or closed: the furthest line there is; "" when nothing is valid."""
        seen = {line.get("line") for line in self.lines}
        return next((state for state in ("closed", "undoing", "active", "planned") if state in seen), "")

    def observed(self) -> Dict[int, Any]:
        """What was read back after each change, by the change's index."""
        return {line["change"]: line["observed"] for line in self.lines if line.get("line") == "applied"}


def _write_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_all(directory: str) -> List[Record]:
    """Every record of a ledger that has a valid line, oldest first by its planned time. Reading only."""
    return sorted(
        (record for record in _load_all(directory) if record.lines),
        key=lambda record: (record.lines[0].get("at", 0), record.id),
    )


def undo_lines(lines: List[Dict[str, Any]]) -> List[str]:
    """The shell lines that undo a record's changes by hand, in their order; what ``active`` told of a damaged one."""
    if lines and lines[0].get("line") == "planned":
        return [undo for _, undo in reversed(lines[0]["shell"])]
    told = [line["result"].get("changed", []) for line in lines if "result" in line]
    return [change["undo_by_hand"] for change in reversed(told[-1] if told else [])]


def drop_empty(directory: str) -> List[str]:
    """Delete records without one valid line: the keeper died before ``planned`` was durable, nothing was touched.

    The paths of those that were deleted.

    For the keeper alone, at its start: seen from elsewhere, such a file may be a record that is being written.
    """
    dropped = [record.path for record in _load_all(directory) if not record.lines]
    for path in dropped:
        os.unlink(path)
    return dropped


def _load_all(directory: str) -> List[Record]:
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        try:
            found.append(Record.load(os.path.join(directory, name)))
        except FileNotFoundError:
            pass  # pruned meanwhile
    return found


def prune(closed: List[Record]) -> List[Record]:
    """Drop all but the newest ``KEEP_CLOSED`` records from the list (oldest first) and the disk; the dropped."""
    dropped = closed[: max(0, len(closed) - KEEP_CLOSED)]
    del closed[: len(dropped)]
    for record in dropped:
        try:
            os.unlink(record.path)
        except OSError:
            pass  # it is read again, and dropped again, by the next keeper
    return dropped
