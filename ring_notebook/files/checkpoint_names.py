"""The names of checkpoints in their folder: a file each, or a folder where every rank has written its shards."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Their folder, in that of a run."""
_NAME = re.compile(r"step-(\d+)(-best)?(\.pt|\.pickle)?$")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is whole."""

    step: int
    best: bool
    path: Path


def name_of(step: int, best: bool, suffix: str) -> str:
    """The name of the checkpoint after ``step`` steps; a folder of shards has no ``suffix``."""
    return f"step-{step:08}{'-best' * best}{suffix}"


def found(folder: Path) -> list[Found]:
    """The checkpoints of a folder, the one that was written last at the end; none where there is no folder.

    An earlier training may have left some there that had made more steps.
    """
    there = []
    for path in folder.glob("step-*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            if match := _NAME.match(path.name):
                there.append((path.stat().st_mtime_ns, Found(int(match[1]), bool(match[2]), path)))
    return [one for _, one in sorted(there, key=lambda pair: (pair[0], pair[1].step))]
