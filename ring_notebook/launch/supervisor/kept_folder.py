"""The folder of a cluster that somebody has removed under it, as `git clean` does: made again with what can be had."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ring_notebook.files.private_files import make_private_folder, open_private

__all__ = ["KeptFolder"]

_MOST_BYTES = 1 << 16  # of a file that is remembered: those by which processes find each other are small
_GROWING, _RECORDS = ".log", "spool"  # how the names of other files end, and a folder of them


class KeptFolder:
    """Remembers the small files of the folder at ``path``; ``last`` is the one by which it is known to be there."""

    def __init__(self, path: Path, last: Path) -> None:
        self._path = path
        self._last = last
        self._inode = last.stat().st_ino
        self._files: dict[Path, tuple[float, bytes]] = {}  # when each was written, and what it holds
        self._missing = False

    def look(self) -> bool:
        """Remember what there is. Returns whether the folder has gone, now and at the look before.

        It may be going just now, with a folder around it that is to go too.
        """
        try:
            there = self._last.stat().st_ino == self._inode
        except OSError:
            there = False
        if there:
            self._remember()
        before, self._missing = self._missing, not there
        return before and not there

    def _remember(self) -> None:
        before, self._files = self._files, {}
        for folder, names, files in os.walk(self._path):
            names[:] = [name for name in names if name != _RECORDS]
            for file in (Path(folder, name) for name in files if not name.endswith(_GROWING)):
                with suppress(OSError):  # it is being replaced
                    about = file.lstat()
                    known = before.get(file)
                    if known and known[0] == about.st_mtime:
                        self._files[file] = known
                    elif stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_BYTES:
                        self._files[file] = about.st_mtime, file.read_bytes()

    def restore(self) -> None:
        """Make the folder again, with what was remembered, and with what this process has written to its log.

        Raises OSError where the folder around the cluster's has gone too, which was removed on purpose.
        """
        os.stat(self._path.parents[2])
        make_private_folder(self._path / "log")
        for file, (_, content) in self._files.items():
            if not file.exists():
                make_private_folder(file.parent)
                with open_private(file, "wb") as written:
                    written.write(content)
        self._restore_log()

    def watch(self) -> None:
        """``last`` is there again, another file than before."""
        self._inode = self._last.stat().st_ino

    def _restore_log(self) -> None:
        name = os.readlink("/proc/self/fd/2")
        path = Path(name.removesuffix(" (deleted)"))
        if not name.endswith(" (deleted)") or not path.is_relative_to(self._path):
            return
        with open("/proc/self/fd/2", "rb") as before, open_private(path, "ab") as log:
            log.write(before.read())
            log.flush()
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
