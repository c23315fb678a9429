"""Files that appear complete or not at all, even if the writing process is killed, with a checksum against damage."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ring_notebook.files.claimed_folders import remove_unclaimed

_MARK = b"ring-notebook"
_CHECKSUM = struct.Struct(f"<{len(_MARK)}sQI")
"""After the content: its length in bytes and its CRC-32. Readers of zip files, such as torch's, ignore it."""
_PIECE = 1 << 20


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, which replaces ``path`` at the end of the block, unless the block raises.

    It is written beside ``path`` and synced to disk. First removes what processes of this user have left there when
    they were killed while writing the same file. With ``private`` it has mode 0600, whatever the umask. A checksum is
    added at its end.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        remove_unclaimed(left, left.unlink)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with _claimed(partial, 0o600 if private else 0o666) as file:
            yield file
            file.write(_checksum(file, file.seek(0, os.SEEK_END)))
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_whole(file: IO[bytes]) -> bool | None:
    """Whether the checksum of ``file`` is right; None if it has none. Leaves ``file`` at its start."""
    length = file.seek(0, os.SEEK_END) - _CHECKSUM.size
    file.seek(max(length, 0))
    found = file.read()
    whole = found == _checksum(file, length) if found.startswith(_MARK) else None
    file.seek(0)
    return whole


def _checksum(file: IO[bytes], length: int) -> bytes:
    """The checksum of the first ``length`` bytes; leaves the file behind them."""
    file.seek(0)
    crc, left = 0, length
    while piece := file.read(min(left, _PIECE)):
        crc, left = zlib.crc32(piece, crc), left - len(piece)
    return _CHECKSUM.pack(_MARK, length, crc)


def _claimed(path: Path, mode: int) -> IO[bytes]:
    """Make ``path``, which must not exist, not even as a link; its lock keeps it from `remove_unclaimed`."""
    while True:
        file = open(path, "x+b", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115 - the caller's
        with contextlib.suppress(OSError):  # no locks here: then nothing counts as abandoned
            fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()
