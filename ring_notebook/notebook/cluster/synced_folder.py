"""The user's own modules: finds what has changed in the notebook's folder, and brings it to the engines."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ring_notebook.errors import ClusterError
from ring_notebook.files.file_digest import digest
from ring_notebook.text.error_text import printable
from ring_notebook.text.words import plural, ranks

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

# Settings, templates, queries and sources of extensions too, which modules read from beside them.
_SUFFIXES = (
    *(".py", ".json", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".conf", ".j2", ".jinja", ".jinja2", ".tmpl"),
    *(".sql", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh"),
)
MOST_BYTES = 1 << 20
"""Larger files are left out: they are data and not code."""
MOST_FILES = 2000
_MOST_FOLDERS = 500
_RANK_SIDE = "ring_notebook.engine.synced_modules"
_OTHERS = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync did: ``changed`` files, how many bytes traveled, ``reloaded`` modules.

    ``left_out`` are files with the reason in brackets.
    """

    changed: tuple[str, ...] = ()
    sent: int = 0
    reloaded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        left = f" Left out: {', '.join(map(printable, self.left_out))}." if self.left_out else ""
        if not self.changed:
            return f"No file has changed.{left}"
        names = f"{', '.join(map(printable, self.changed[:4]))}{', ...' * (len(self.changed) > 4)}"
        how = f", {self.sent} bytes sent" if self.sent else ""
        reloaded = f"reloaded {', '.join(self.reloaded)}" if self.reloaded else "no rank has imported it yet"
        return f"Synced {plural(len(self.changed), 'file')} ({names}{how}): {reloaded}.{left}"


class SyncedFolder:
    """The code in ``folder`` and below: files of Python and of settings, without hidden ones.

    Links that lead out of it are ignored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._stamps: dict[str, tuple[int, int]] = {}  # time and size of each file when the engines got it

    def assume_synced(self) -> None:
        """Engines that start now import what the folder holds now."""
        self._stamps, _ = self._scan()

    def sync(self, engines: Engines) -> Synced:
        """Bring files that have changed since the last sync to all engines, which reload modules they have imported.

        Raises ClusterError when the folder holds too much, or a module cannot be loaded; the next call tries again.
        """
        stamps, left_out = self._scan()
        changed = sorted(path for path in stamps if self._stamps.get(path) != stamps[path])
        removed = sorted(self._stamps.keys() - stamps.keys())
        if not changed and not removed:
            return Synced(left_out=left_out)
        roots, sent = self._deliver(engines, changed, removed)
        living = engines.living()
        answers = engines.call(f"{_RANK_SIDE}:use", roots, changed, ranks=living)
        failed: dict[str, list[int]] = {}
        for rank, (_, errors) in zip(living, answers, strict=True):
            for error in errors:
                failed.setdefault(error, []).append(rank)
        if failed:
            message = "; ".join(f"{ranks(where)}: {error}" for error, where in failed.items())
            raise ClusterError(f"{message}; fix it and run the cell again: the ranks keep what they had")
        self._stamps = stamps
        reloaded = {name for names, _ in answers for name in names}
        return Synced((*changed, *removed), sent, tuple(sorted(reloaded)), left_out)

    def bring(self, engines: Engines, ranks: Sequence[int]) -> None:
        """Have the new processes of ``ranks`` import from the same folder as other ranks of their hosts."""
        if not all(engines.all[rank].local for rank in ranks):
            there, _ = self._scan()
            roots, _ = self._deliver(engines, sorted(there.keys() & self._stamps.keys()), [])
            engines.call(f"{_RANK_SIDE}:use", roots, [], ranks=ranks)

    def _deliver(self, engines: Engines, changed: Sequence[str], removed: Sequence[str]) -> tuple[list[str], int]:
        """The folder that each rank imports from, and how many bytes traveled to hosts that do not see this one."""
        roots = {engine.host: str(self.folder) for engine in engines.all if engine.local}
        digests: dict[str, str] = {}
        sent = 0
        for engine in (engines.all[rank] for rank in engines.living()):
            if engine.host in roots:
                continue
            digests = digests or {path: digest(self.folder / path) for path in changed}
            arguments = str(self.folder), digests, removed
            root, missing = engines.call(f"{_RANK_SIDE}:compare", *arguments, ranks=[engine.rank])[0]
            contents = {path: (self.folder / path).read_bytes() for path in missing}
            if contents:
                engines.call(f"{_RANK_SIDE}:take", contents, ranks=[engine.rank])
                sent += sum(map(len, contents.values()))
            roots[engine.host] = root
        return [roots.get(engine.host, "") for engine in engines.all], sent

    def _scan(self) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
        """Time and size of each file by its path in the folder, and the files that are left out, with the reason."""
        stamps: dict[str, tuple[int, int]] = {}
        left_out: list[str] = []
        for path in self._files():
            try:
                about = path.stat()
            except OSError:  # removed meanwhile
                continue
            name = path.relative_to(self.folder).as_posix()
            if not stat.S_ISREG(about.st_mode):
                left_out.append(f"{name} (not a regular file)")  # opening a named pipe would wait for a writer
            elif about.st_size > MOST_BYTES:
                left_out.append(f"{name} (above {MOST_BYTES >> 20} MiB)")
            elif not os.access(path, os.R_OK):
                left_out.append(f"{name} (not readable)")
            else:
                stamps[name] = about.st_mtime_ns, about.st_size
            if len(stamps) > MOST_FILES:
                raise ClusterError(self._too_much(f"{MOST_FILES} files of code"))
        return stamps, tuple(sorted(left_out))

    def _files(self) -> Iterator[Path]:
        for count, (folder, below, files) in enumerate(os.walk(self.folder)):
            if count >= _MOST_FOLDERS:
                raise ClusterError(self._too_much(f"{_MOST_FOLDERS} folders"))
            below[:] = [name for name in below if _is_code(Path(folder), name)]
            for name in files:
                path = Path(folder, name)
                leads_out = path.is_symlink() and not path.resolve().is_relative_to(self.folder)
                if name.endswith(_SUFFIXES) and not name.startswith(".") and not leads_out:
                    yield path

    def _too_much(self, what: str) -> str:
        return f"{self.folder} holds more than {what} to sync; keep the notebook and its code in a folder of their own"


def _is_code(folder: Path, name: str) -> bool:
    """Whether the folder of this name may hold the user's code, and is not hidden or an environment of packages."""
    return not name.startswith(".") and name not in _OTHERS and not (folder / name / "pyvenv.cfg").exists()
