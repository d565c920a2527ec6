"""The run file: on the caller's side, which nodes a run was sent to and how, written before the first is called.

So that ``chaos gpu revert --run`` and a rollback in another process know where to go, whatever became of the caller.
"""

import contextlib
import json
import os
import time
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

from chaosgpu.changes.errors import ChaosgpuError

KEEP = 200


@lru_cache(maxsize=1)
def this_run() -> str:
    """The run's id: one for the life of this process, which is one ``chaos run``."""
    return uuid.uuid4().hex[:12]


def directory() -> Path:
    """``$XDG_STATE_HOME/chaosgpu/runs``, by default under ``~/.local/state`` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "chaosgpu" / "runs"


def remember(run: str, nodes: list[str], transport: str) -> Path:
    """Add nodes to a run's file, atomically and durably; its path. Raises ChaosgpuError where it cannot be written."""
    try:
        return _write(run, nodes, transport)
    except OSError as error:
        raise ChaosgpuError(
            f"the run cannot be remembered in {directory()} ({error.strerror}), so no fault is started:"
            " free space there or set XDG_STATE_HOME"
        ) from None


def _write(run: str, nodes: list[str], transport: str) -> Path:
    folder = directory()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{run}.json"
    known = recall(run)
    document = {
        "run": run,
        "transport": transport,
        "nodes": sorted({*known.get("nodes", []), *nodes}),
        "pid": os.getpid(),
        "started_at": known.get("started_at", time.time()),
    }
    if known.get("nodes") == document["nodes"]:
        return path
    temporary = path.with_suffix(f".{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    for old in _oldest_first()[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def _oldest_first() -> list[Path]:
    dated = []
    for path in directory().glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another run pruned it meanwhile
            dated.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


def recall(run: str) -> dict[str, Any]:
    """A run's file, or {} when there is none."""
    try:
        document = json.loads((directory() / f"{run}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def newest() -> str:
    """The run that was remembered last. Raises ChaosgpuError when there is none."""
    known = _oldest_first()
    if not known:
        raise ChaosgpuError(f"no run is remembered in {directory()}: chaos gpu revert --all undoes what this node has")
    return known[-1].stem
