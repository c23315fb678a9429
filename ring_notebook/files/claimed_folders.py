"""Folders, and files, that are removed when no process claims them any more, however their processes have ended.

A lock tells the dead from the living where process ids do not: they are used again, and containers that share a folder
have numbers of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"ring-(?:run|code)-[0-9a-f]{16}")


def claim(path: Path) -> int:
    """Make the folder at ``path``; a descriptor that keeps it from `remove_unclaimed` while a process has it.

    Other processes may have claimed it too.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, as abandoned
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with contextlib.suppress(OSError):  # no locks here: then nothing counts as abandoned
                fcntl.flock(folder, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), os.stat(path)):
                    return folder
            os.close(folder)


def remove_unclaimed(path: Path, remove: Callable[[], object]) -> None:
    """Call ``remove`` if ``path`` is this user's and no process claims it, and while none can claim it."""
    with contextlib.suppress(OSError):  # in use, or a link
        folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(folder).st_uid == os.geteuid():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove()
        finally:
            os.close(folder)


@contextlib.contextmanager
def claimed_folder(kind: Literal["run", "code"]) -> Iterator[Path]:
    """A new private folder for temporary files, removed at the end of the block.

    First it removes those of this user whose processes were killed before they could do so.
    """
    place = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):  # a place that this user may not list
        for left in filter(_NAME.fullmatch, os.listdir(place)):
            remove_unclaimed(place / left, functools.partial(shutil.rmtree, place / left, ignore_errors=True))
    path = (place / f"ring-{kind}-{secrets.token_hex(8)}").resolve()
    claimed = claim(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(claimed)
