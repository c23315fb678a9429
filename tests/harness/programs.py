"""Programs that tests run to their end: with what they have written, and `ringrun` among them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["RINGRUN", "executable", "mpiexec_of", "ran", "ringrun"]

RINGRUN = (sys.executable, "-m", "ring_notebook.launch.cli")


def executable(path: Path, text: str) -> Path:
    """Make ``path`` a script that anybody may execute; returns it."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def mpiexec_of(script: str, folder: Path) -> Path:
    """An mpiexec of nobody's MPI, which does what ``script`` says."""
    return executable(folder / "mpiexec", f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')


def ran(command: Sequence[str | Path], timeout: float = 200, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with its output as text. ``options`` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def ringrun(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A job of ringrun that has ended; its output is that of its ranks, without their numbers."""
    return ran([*RINGRUN, "--no-prefix", *arguments], **options)
