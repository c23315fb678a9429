"""Names that the pytest of a user and the pytests inside ranks share."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER", "SIZE", "report_file", "stack_file"]

FOLDER = "TEST_RANKS_FOLDER"
"""Environment: where the ranks of a launch write their reports. Only ranks have it."""

SIZE = "TEST_RANKS_SIZE"
"""Environment: how many ranks the launch has."""


def report_file(folder: Path, rank: int) -> Path:
    """JSON lines: which test has started and ended on ``rank``, and how."""
    return folder / f"rank-{rank}.jsonl"


def stack_file(folder: Path, rank: int) -> Path:
    """Where SIGUSR1 makes ``rank`` write the stacks of its threads."""
    return folder / f"stacks-{rank}.txt"
