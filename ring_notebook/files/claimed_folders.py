"""Folders and files that are removed when no process claims them any more, however their processes have ended.

A claim is a lock, because process ids do not suffice: they are reused, and containers that share a folder have
different ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"ring-(?:run|code)-[0-9a-f]{16}")
_MAY_LACK_LOCKS = stat.S_ISVTX
"""The mode of a folder whose process has no lock on it, or not yet; those outside of its sandbox may have locks."""


def claim(path: Path) -> int:
    """Make the folder at ``path`` and return a descriptor. While a process has that open, `remove_unclaimed` keeps it.

    Other processes may claim the folder too.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=_MAY_LACK_LOCKS | 0o700)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it as unclaimed
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with contextlib.suppress(OSError):  # a sandbox may refuse locks: then nothing counts as abandoned
                fcntl.flock(folder, fcntl.LOCK_SH)
                os.fchmod(folder, 0o700)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), os.stat(path)):
                    return folder
            os.close(folder)


def remove_unclaimed(path: Path, remove: Callable[[], object]) -> None:
    """Call ``remove`` if ``path`` belongs to this user and no process claims it; meanwhile no process can claim it."""
    with contextlib.suppress(OSError):  # in use, or a link
        folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            about = os.fstat(folder)
            if about.st_uid == os.geteuid() and not about.st_mode & _MAY_LACK_LOCKS:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove()
        finally:
            os.close(folder)


@contextlib.contextmanager
def claimed_folder(kind: Literal["run", "code"]) -> Iterator[Path]:
    """A new private folder for temporary files, removed at the end of the block.

    First removes this user's earlier folders whose processes were killed.
    """
    place = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):  # this user cannot list the folder
        for left in filter(_NAME.fullmatch, os.listdir(place)):
            remove_unclaimed(place / left, functools.partial(shutil.rmtree, place / left, ignore_errors=True))
    path = (place / f"ring-{kind}-{secrets.token_hex(8)}").resolve()
    claimed = claim(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(claimed)
