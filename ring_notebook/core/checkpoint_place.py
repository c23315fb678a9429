"""Where the run in progress keeps its checkpoints, and the one that it resumes from, as its notebook says."""

from __future__ import annotations

from pathlib import Path

folder: Path | None = None
resume: Path | None = None


def begin(new_folder: str, new_resume: str) -> None:
    """A run begins; ``new_resume`` is empty for one that does not resume."""
    global folder, resume
    folder, resume = Path(new_folder), Path(new_resume) if new_resume else None
