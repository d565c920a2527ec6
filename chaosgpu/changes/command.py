"""A command with its inverse, for what has no change of its own. Argument lists only, never a shell's string."""

import shlex
from dataclasses import dataclass, field
from typing import ClassVar, List

from chaosgpu.changes.base import Created, Described
from chaosgpu.changes.grip import Grip


@dataclass(frozen=True)
class Command(Created):
    """``do`` makes something that ``check`` finds (exit status 0) and ``undo`` takes away.

    The thing's name must carry the injection's id, so that what ``check`` finds is ours. ``key`` is its conflict key.
    """

    kind: ClassVar[str] = "command"

    what: str
    key: str
    do: List[str] = field(default_factory=list)
    undo_by: List[str] = field(default_factory=list)
    check: List[str] = field(default_factory=list)

    def keys(self) -> List[str]:
        return [self.key]

    def name(self) -> str:
        return self.what

    def present(self, grip: Grip) -> bool:
        return grip.run(self.check, check=False)[0] == 0

    def create(self, grip: Grip) -> None:
        grip.run(self.do)

    def remove(self, grip: Grip) -> None:
        grip.run(self.undo_by)

    def describe(self) -> Described:
        return Described(" ".join(map(shlex.quote, self.do)), " ".join(map(shlex.quote, self.undo_by)))
