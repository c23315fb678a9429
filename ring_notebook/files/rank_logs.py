"""The files with a rank's output below Python and at a crash, and which part is of its last cell."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ring_notebook.files.private_files import open_regular, replace_text

CRASH = "log"
SUFFIXES = ("out", "err", CRASH)
_BEGIN = "begin"  # suffix of the file with the lengths of the others when the last cell began


def log_path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / f"rank-{rank}.{suffix}"


def cell_begins(folder: Path, rank: int) -> None:
    """Remember the lengths of this rank's files, if it has any."""
    with suppress(OSError):
        sizes = [log_path(folder, rank, suffix).stat().st_size for suffix in SUFFIXES]
        replace_text(log_path(folder, rank, _BEGIN), " ".join(map(str, sizes)))


def of_last_cell(folder: Path, rank: int) -> str | None:
    """What a rank has written since its last cell began; None if it has no files that can be read here."""
    begins = [0] * len(SUFFIXES)
    with suppress(OSError, ValueError):
        found = [int(size) for size in _read(log_path(folder, rank, _BEGIN)).split()]
        begins = found if len(found) == len(SUFFIXES) else begins
    written = []
    for suffix, begin in zip(SUFFIXES, begins, strict=True):
        with suppress(FileNotFoundError):
            written.append(_read(log_path(folder, rank, suffix), begin).decode(errors="replace"))
    return "".join(written) if written else None


def _read(path: Path, begin: int = 0) -> bytes:
    with open_regular(path) as file:
        # If a program of the cell has emptied the file, as `> /dev/stdout` in a shell does, all of it is new.
        file.seek(begin if begin <= os.fstat(file.fileno()).st_size else 0)
        return file.read()
