"""Where the run in progress keeps its checkpoints, which one it resumes from, and when one is due at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class CheckpointPlace:
    """Of a run in a notebook; a script has no folder of its own, and resumes from what it names itself."""

    folder: Path | None = None
    resume: str = ""
    """The path or URL of a checkpoint; empty for a run that does not resume."""
    due: bool = False
    """Whether a checkpoint is to be written at the next step."""

    def take_due(self) -> bool:
        """Whether one is due, once."""
        due, self.due = self.due, False
        return due


of_run = CheckpointPlace()
"""That of the run in progress."""


def begin(folder: str, resume: str) -> None:
    """A run begins."""
    of_run.folder, of_run.resume, of_run.due = Path(folder), resume, False


def ask() -> None:
    """Have the run in progress write a checkpoint at its next step; called from another thread."""
    of_run.due = True
