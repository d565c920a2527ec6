"""The errors an operator reads: one line each, naming the resource, the reason and the way out."""

from typing import List


class ChaosgpuError(Exception):
    """Base of every expected error. ``str()`` is the one line that is shown; ``kind`` is its machine-readable name."""

    kind = "failed"

    def __str__(self) -> str:
        return " ".join(str(self.args[0] if self.args else self.kind).split())


class BadArgument(ChaosgpuError):
    """An argument that can never work: which one, which value, what is allowed."""

    kind = "bad-argument"


class Refused(ChaosgpuError):
    """A node declined a fault before anything was touched. Carries every reason, not only the first."""

    kind = "refused"

    def __init__(self, reasons: List[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class ChangeFailed(ChaosgpuError):
    """A change could not be applied or undone."""

    kind = "change-failed"


class Moved(ChangeFailed):
    """What the survey read is no longer there: someone else changed it between survey and apply."""

    kind = "moved"


class NoEffect(ChaosgpuError):
    """Everything was applied and nothing happened: the second worst bug, so it is an error."""

    kind = "no-effect"


class Unreachable(ChaosgpuError):
    """The node's keeper cannot be reached or did not answer in time."""

    kind = "unreachable"
