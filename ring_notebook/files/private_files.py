"""Folders and files that only their owner can read, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path
from typing import IO, Any


def make_private_folder(path: Path) -> None:
    """Make ``path`` and its missing parents with mode 0700; existing folders keep their mode."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)  # mkdir's own `parents` would leave their mode to the umask


def temporary_folder() -> Path:
    """The folder of temporary files. `tempfile` tries whether it can write there, and fails under a limit on files."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open ``path`` as `open` does, text as UTF-8; a file that this creates has mode 0600."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, 0o600))


def replace_text(path: Path, text: str, *, private: bool = True) -> None:
    """Write ``text`` to ``path``, in place of an older file, so that a reader never sees half of it.

    After a crash of the machine it may be empty: `whole_file` waits for the disk. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open_private(partial, "w") if private else partial.open("w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def open_regular(path: Path, flags: int = 0) -> IO[bytes]:
    """Open ``path`` to read it. Raises OSError, and ValueError if it is not a regular file, such as a named pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def open_own(path: Path) -> IO[bytes]:
    """`open_regular` without links. Raises PermissionError for a file of another user, because it could run code."""
    file = open_regular(path, os.O_NOFOLLOW)
    if os.fstat(file.fileno()).st_uid in (os.geteuid(), 0):
        return file
    file.close()
    raise PermissionError("it belongs to another user, whose code it could run")


def changed_by_others(folder: Path) -> str:
    """How another user could change the content of ``folder``, and what to do; empty when none could."""
    try:
        status = folder.stat()
    except OSError:
        return ""
    for seen in (folder, folder.resolve()):  # a link, and what it leads to
        if not is_own(seen):
            return f"{folder} belongs to another user, {owner_of(seen)}; remove it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        return f"other users may write to {folder}; `chmod go-w` it"
    return ""


def owner_of(path: Path) -> str:
    """The name of the user to whom ``path``, or the nearest folder above it that can be seen, belongs."""
    for seen in (path, *path.parents):
        with contextlib.suppress(OSError):
            user = seen.lstat().st_uid
            try:
                return pwd.getpwuid(user).pw_name
            except KeyError:
                return f"user {user}"
    return "nobody"


def is_own(path: Path) -> bool:
    """Whether ``path`` belongs to this user or to root: reading a file of another user may run code."""
    return path.lstat().st_uid in (os.geteuid(), 0)
