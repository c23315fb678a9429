"""Files that appear complete or not at all, even if the writing process is killed, with a checksum against damage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
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
_MOST_LINKS = 40  # as the kernel's


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write, which replaces ``path`` at the end of the block, unless the block raises.

    It is written beside ``path`` and synced to disk. First removes what processes of this user have left there when
    they were killed while writing the same file. With ``private`` it has mode 0600, whatever the umask. A checksum is
    added at its end. Raises PermissionError where the folder of ``path`` is a link of another user; one that takes its
    place later changes nothing.
    """
    descriptor = _open_folder(path.parent)
    folder = Path(f"/proc/self/fd/{descriptor}")
    partial = folder / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        for left in folder.glob(f".{glob.escape(path.name)}.*.partial"):
            remove_unclaimed(left, left.unlink)
        with _claimed(partial, 0o600 if private else 0o666) as file:
            yield file
            file.write(_checksum(file, file.seek(0, os.SEEK_END)))
            file.flush()
            os.fsync(file.fileno())
            partial.replace(folder / path.name)
    except OSError as error:
        for name in ("filename", "filename2"):
            if str(getattr(error, name)).startswith(f"{folder}/"):
                setattr(error, name, str(path))  # which the user knows
        raise
    finally:
        partial.unlink(missing_ok=True)
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    """A descriptor of the folder at ``path``; follows links of this user or root only."""
    for _ in range(_MOST_LINKS):
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        status = os.fstat(found)
        if not stat.S_ISLNK(status.st_mode):
            return found
        target = os.readlink("", dir_fd=found)
        os.close(found)
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{path} is a link of another user, who could lead it anywhere; remove it")
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def is_whole(file: IO[bytes]) -> bool | None:
    """Whether the checksum of ``file`` is right; None if it has none. Leaves ``file`` at its start."""
    length = file.seek(0, os.SEEK_END) - _CHECKSUM.size
    file.seek(max(length, 0))
    found = file.read()
    whole = found == _checksum(file, length) if found.startswith(_MARK) else None
    file.seek(0)
    return whole


def checked(data: bytes) -> bytes:
    """The content of a `whole_file` that was read as ``data``. Raises ValueError if it is damaged or was cut off."""
    content, end = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if end != _CHECKSUM.pack(_MARK, len(content), zlib.crc32(content)):
        raise ValueError("the file is damaged, or was not written as a whole")
    return content


def with_checksum(content: bytes) -> bytes:
    """``content`` as `checked` reads it, for places that are no file system of this machine."""
    return content + _CHECKSUM.pack(_MARK, len(content), zlib.crc32(content))


def _checksum(file: IO[bytes], length: int) -> bytes:
    """The checksum of the first ``length`` bytes; leaves the file after them."""
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
