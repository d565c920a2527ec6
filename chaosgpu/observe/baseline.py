"""What was measured before a fault, kept by name as long as this process (one ``chaos run``) lives."""

import threading
from dataclasses import dataclass

from chaosgpu.changes.errors import BadArgument
from chaosgpu.observe.verdict import Reading


@dataclass(frozen=True)
class Baseline:
    """A number, and how it was read, so that it is read in the same way again."""

    query: str
    reading: Reading
    value: float


_kept: dict[str, Baseline] = {}
_lock = threading.Lock()


def standing(name: str, query: str, reading: Reading) -> Baseline | None:
    """The baseline of a name, or None where there is none yet.

    :raises BadArgument: it is of something else.
    """
    with _lock:
        baseline = _kept.get(name)
    if baseline is not None and (baseline.query, baseline.reading) != (query, reading):
        raise BadArgument(f"name is {name!r}: that baseline is of another query or reduce; choose another name")
    return baseline


def keep(name: str, baseline: Baseline) -> None:
    """Keep a baseline, in place of one of that name."""
    with _lock:
        _kept[name] = baseline


def find(name: str) -> Baseline:
    """The baseline of a name.

    :raises BadArgument: there is none.
    """
    with _lock:
        if name in _kept:
            return _kept[name]
        known = ", ".join(sorted(_kept)) or "none"
        raise BadArgument(
            f"baseline is {name!r}: capture_baseline has not kept it (it kept {known}); capture it earlier"
        )
