"""Long-lived processes of the lab: each records itself before it becomes what it is to run, so none is ever lost.

A service is known by its pid, start time (proc_pid_stat(5), field 22) and the boot; only that process is ever ended.
"""

import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaosgpu.lab.commands import SEARCH
from chaosgpu.lab.errors import LabError

START_LIMIT_SECONDS = 10
TERM_LIMIT_SECONDS = 3
KILL_LIMIT_SECONDS = 60  # a process in a throttled write ends when the write does

# $1 the record, then cgroup directories, "--", and the command. The shell is the process that becomes the command; its
# standard input is the lab's lock, given up only when the record is in place.
LAUNCH = """
record=$1; shift
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift
read -r stat < /proc/self/stat; read -r boot < /proc/sys/kernel/random/boot_id
echo "$boot $stat" > "$record.new" && mv "$record.new" "$record" || exit 1
exec "$@" < /dev/null
"""


@dataclass(frozen=True)
class Service:
    """A process of the lab and where it is recorded and logs."""

    name: str
    directory: Path

    @property
    def record(self) -> Path:
        """The file that says which process it is."""
        return self.directory / f"{self.name}.process"

    @property
    def log(self) -> Path:
        """What it wrote to its standard output and error."""
        return self.directory / "log" / f"{self.name}.log"

    def pid(self) -> int | None:
        """The pid while exactly that process runs, else None."""
        try:
            boot, recorded = self.record.read_text(encoding="utf-8").split(" ", 1)
            present = Path("/proc", recorded.split(" ", 1)[0], "stat").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        if boot != Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip():
            return None
        if _start_time(present) != _start_time(recorded) or _state(present) in "ZX":
            return None
        return int(recorded.split(" ", 1)[0])

    def stopped(self) -> bool:
        """Whether it is held by a signal or a tracer (state T or t)."""
        pid = self.pid()
        try:
            return pid is not None and _state(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")) in "Tt"
        except OSError:
            return False

    def start(
        self,
        lock: int,
        command: list[str],
        groups: list[Path] | None = None,
        handed_down: tuple[int, ...] = (),
    ) -> int:
        """Start it in a session of its own, in the given cgroups, with the given descriptors. Returns its pid."""
        self.record.unlink(missing_ok=True)
        self.log.parent.mkdir(exist_ok=True)
        # The interpreter must find this package from / as the caller found it, whether installed or not.
        packages = str(Path(__file__).parents[2])
        python_path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
        with self.log.open("wb") as log:
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", LAUNCH, "sh", str(self.record)]
                + [str(group) for group in groups or []]
                + ["--", *command],
                stdin=lock,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "PATH": SEARCH, "PYTHONPATH": python_path, "PYTHONSAFEPATH": "1"},
                pass_fds=handed_down,
                check=True,
            )
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while time.monotonic() < deadline:
            if self.record.exists():
                pid = self.pid()
                if pid is None:
                    break
                return pid
            time.sleep(0.005)
        raise LabError(f"{self.name} did not start: {self.last_words()}")

    def stop(self) -> bool:
        """End it, by SIGTERM and then SIGKILL, and forget it. False when it was not running."""
        pid = self.pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if self.pid() == pid:  # and not a successor that got the number before the handle was made
                        _end(handle, self.name, pid)
                finally:
                    os.close(handle)
        self.record.unlink(missing_ok=True)
        return pid is not None

    def last_words(self) -> str:
        """The last line of its log, for an error."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else f"nothing in {self.log}"


def _end(handle: int, name: str, pid: int) -> None:
    gone = select.poll()
    gone.register(handle, select.POLLIN)
    for number, limit_seconds in ((signal.SIGTERM, TERM_LIMIT_SECONDS), (signal.SIGKILL, KILL_LIMIT_SECONDS)):
        signal.pidfd_send_signal(handle, number)
        if gone.poll(limit_seconds * 1000):
            return
    raise LabError(f"{name} (pid {pid}) does not end {KILL_LIMIT_SECONDS} s after SIGKILL; is its disk hanging?")


def _start_time(stat: str) -> str:
    return stat.rpartition(")")[2].split()[19]


def _state(stat: str) -> str:
    return stat.rpartition(")")[2].split()[0]
