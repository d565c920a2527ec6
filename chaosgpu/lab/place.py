"""Where one lab keeps everything it makes, and the record it writes before it makes it."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaosgpu.lab.errors import LabError

SCHEMA = 1


@dataclass
class Record:
    """What a lab makes outside its directory, and what it chose: on disk before it is made."""

    ports: dict[str, int] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)  # cgroup directories, parents first
    controllers: dict[str, list[str]] = field(default_factory=dict)  # switched on, by cgroup directory
    no_network: str = ""  # why the ranks talk over loopback; empty when they have namespaces


class Place:
    """The directory of one lab: by default ``/run/chaosgpu-lab``, or what ``$CHAOSGPU_LAB`` says.

    It lies in /run since nothing of it but files survives a reboot either. Its last part names the lab's cgroups, so
    that several labs can stand side by side.
    """

    def __init__(self) -> None:
        self.directory = Path(os.environ.get("CHAOSGPU_LAB") or "/run/chaosgpu-lab").absolute()
        self.name = self.directory.name
        self.checkpoints = self.directory / "checkpoints"
        self.logs = self.directory / "log"
        self.variables = self.directory / "variables.json"
        self._record = self.directory / "record.json"
        self._lock = self.directory / "lock"

    def load(self) -> Record:
        """The record; an empty one when there is no lab."""
        try:
            content = json.loads(self._record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Record()
        if content.pop("schema") != SCHEMA:
            raise LabError(f"{self._record} was written by another version of chaosgpu: use that one to take it down")
        return Record(**content)

    def save(self, record: Record) -> None:
        """Put the record on disk before anything in it is made."""
        write_atomically(self._record, json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1) + "\n")

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[int]:
        """Hold the lab alone; yields the lock's descriptor, which child processes get as their standard input.

        A child that outlives a killed ``up`` so keeps the lock until it is done or has recorded itself, and the next
        command starts from what is really there. ``waiting`` is called once when another holds the lock.
        """
        while True:
            descriptor: int | None = None
            try:
                self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise LabError(f"cannot write in {self.directory}: {error.strerror}; run as root") from error
            if descriptor is None:
                continue  # a `down` deleted the directory in between
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    waiting()
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # A `down` that held it may have deleted it in between: then this lock guards nothing.
                if self._lock.exists() and os.path.samestat(os.fstat(descriptor), self._lock.stat()):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def delete(self) -> None:
        """Remove the directory; the caller has taken everything else down and holds the lock."""
        shutil.rmtree(self.directory)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole, durably."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
