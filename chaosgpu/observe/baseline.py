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


def keep(name: str, baseline: Baseline, replace: bool) -> Baseline:
    """Keep a baseline, unless one is there. Returns the one that stands.

    The first stands: a steady-state hypothesis is evaluated before and after the method, and what it captures
    afterwards is what must be compared.

    :raises BadArgument: the one that stands is of another query.
    """
    with _lock:
        standing = _kept.get(name)
        if standing is None or replace:
            _kept[name] = standing = baseline
        if (standing.query, standing.reading) != (baseline.query, baseline.reading):
            raise BadArgument(f"name is {name!r}: that baseline is of another query or reduce; choose another name")
        return standing


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
