"""Files that appear whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ring_notebook.files.claimed_folders import remove_unclaimed

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of ``path`` at the end of the block, unless that raises.

    It is written beside ``path`` and synced to disk. First what processes of this user have left there goes that were
    killed while they wrote the same file. With ``private`` it has mode 0600, whatever the umask.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        remove_unclaimed(left, left.unlink)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with _claimed(partial, 0o600 if private else 0o666) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _claimed(path: Path, mode: int) -> IO[bytes]:
    """Make ``path``, which must not exist, not even as a link; its lock keeps it from `remove_unclaimed`."""
    while True:
        file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115 - the caller's
        with contextlib.suppress(OSError):  # no locks here: then nothing counts as abandoned
            fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()
