"""Where the run in progress keeps its checkpoints, which one it resumes from, and when one is due at once."""

from __future__ import annotations

from pathlib import Path

folder: Path | None = None
resume: Path | None = None
_asked = False


def begin(new_folder: str, new_resume: str) -> None:
    """A run begins; ``new_resume`` is empty for one that does not resume."""
    global folder, resume, _asked
    folder, resume, _asked = Path(new_folder), Path(new_resume) if new_resume else None, False


def ask() -> None:
    """Have the run in progress write a checkpoint at its next step; called from another thread."""
    global _asked
    _asked = True


def take_asked() -> bool:
    """Whether a checkpoint was asked for since the last call."""
    global _asked
    asked, _asked = _asked, False
    return asked
