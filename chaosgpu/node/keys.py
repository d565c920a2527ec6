"""Conflict keys: what two faults may not hold at once.

A key is ``kind:identity``. Two keys conflict when they are equal, or, for ``cgroup`` keys, when one path contains the
other. Block devices need no rule here: a fault on a filesystem lists every device of the stack below it.
"""

from typing import Iterable, Optional, Tuple


def conflict(one: str, other: str) -> bool:
    if one == other:
        return True
    if one.startswith("cgroup:") and other.startswith("cgroup:"):
        a, b = one.rstrip("/") + "/", other.rstrip("/") + "/"
        return a.startswith(b) or b.startswith(a)
    return False


def first_conflict(ours: Iterable[str], theirs: Iterable[str]) -> Optional[Tuple[str, str]]:
    """The first pair of conflicting keys, or None."""
    others = list(theirs)
    return next(((a, b) for a in ours for b in others if conflict(a, b)), None)
