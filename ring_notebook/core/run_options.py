"""What the run in progress was started with, for calls of its cell that are not given it themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunOptions:
    """Of a run in a notebook; a script has the defaults."""

    checkpoints: Path | None = None
    """The folder of its checkpoints; a script has none of its own."""
    resume: str = ""
    """The path or URL of a checkpoint; empty for a run that does not resume."""
    sync_every: int = 1
    """Steps between syncs, for optimizers that are made without a number of their own; 1 to reduce at every step."""
    logical: int = 0
    """Logical ranks; 0 for none."""
    is_checkpoint_due: bool = False
    """Whether a checkpoint is to be written at the next step."""
    _taken: set[str] = field(default_factory=set)

    def begin(self, checkpoints: str, resume: str, sync_every: int, logical: int) -> None:
        vars(self).update(vars(RunOptions(Path(checkpoints), resume, sync_every, logical)))

    def take(self, name: str) -> int:
        """The number ``name``, for what is made with it."""
        self._taken.add(name)
        number: int = getattr(self, name)
        return number

    def is_lost(self, name: str) -> bool:
        """Whether the run was started with a number ``name`` that nothing has taken."""
        return getattr(self, name) != getattr(RunOptions, name) and name not in self._taken


of_run = RunOptions()
"""Those of the run in progress."""


def ask_for_checkpoint() -> None:
    """Have the run in progress write a checkpoint at its next step; called from another thread."""
    of_run.is_checkpoint_due = True
