"""Run the system's own tools, and say in one line what went wrong."""

import os
import shutil
import subprocess
from pathlib import Path

from chaosgpu.lab.errors import LabError

# mkfs, losetup and ip lie in directories that a non-login shell may not search.
SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
LIMIT_SECONDS = 60


def found(tool: str) -> bool:
    """Whether a tool is on this machine."""
    return shutil.which(tool, path=SEARCH) is not None


def run(lock: int, *command: str | Path) -> str:
    """Run a tool to its end and return what it printed; the lab's lock is its standard input (see `Place.locked`).

    :raises LabError: the tool failed, with its own first line.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            stdin=lock,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": SEARCH, "LC_ALL": "C"},
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(words)}` did not finish in {LIMIT_SECONDS} s") from None
    except OSError as error:
        raise LabError(f"`{words[0]}` could not be run: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise LabError(f"`{' '.join(words)}` failed: {said[0]}")
    return done.stdout
