"""Options of the run in progress: the defaults for calls in its cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunOptions:
    """The options of a run in a notebook; a script has the defaults."""

    checkpoints: Path | None = None
    """The folder of the run's checkpoints; None in a script."""
    resume: str = ""
    """The path or URL of the checkpoint to resume from; empty for none."""
    sync_every: int = 1
    """Steps between syncs, for optimizers made without ``sync_every``; 1 to reduce at every step."""
    logical: int = 0
    """Logical ranks; 0 for none."""
    is_checkpoint_due: bool = False
    """Whether a checkpoint is to be written at the next step."""
    _taken: set[str] = field(default_factory=set)

    def begin(self, checkpoints: str, resume: str, sync_every: int, logical: int) -> None:
        vars(self).update(vars(RunOptions(Path(checkpoints), resume, sync_every, logical)))

    def take(self, name: str) -> int:
        """The option ``name``, a number; notes that it has been used."""
        self.note_use(name)
        number: int = getattr(self, name)
        return number

    def note_use(self, name: str) -> None:
        """Note that the option ``name`` has been used."""
        self._taken.add(name)

    def is_lost(self, name: str) -> bool:
        """Whether the run was started with an option ``name`` that nothing has used."""
        return getattr(self, name) != getattr(RunOptions, name) and name not in self._taken


of_run = RunOptions()
"""The options of the run in progress."""


def ask_for_checkpoint() -> None:
    """Have the run in progress write a checkpoint at its next step; called from another thread."""
    of_run.is_checkpoint_due = True
