"""Programs that tests run to their end: with what they have written, and `ringrun` among them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["RINGRUN", "ran", "ringrun"]

RINGRUN = (sys.executable, "-m", "ring_notebook.launch.cli")


def ran(command: Sequence[str | Path], timeout: float = 200, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with its output as text. ``options`` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def ringrun(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A job of ringrun that has ended; its output is that of its ranks, without their numbers."""
    return ran([*RINGRUN, "--no-prefix", *arguments], **options)
