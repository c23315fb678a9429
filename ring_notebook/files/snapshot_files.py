"""Folders of snapshots: a file of each rank, memory of tensors by its digest, and a manifest that makes it whole.

The ranks write a snapshot into a shared folder, which is renamed when the last rank has written. The manifest names
every file with its length; a piece of memory has its digest for a name, so equal memory of several ranks is one file.
Memory that an earlier snapshot has is linked, not written again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from ring_notebook.errors import RingError
from ring_notebook.files.private_files import changed_by_others, is_own, make_private_folder, open_own
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.files.whole_file import is_whole, whole_file
from ring_notebook.text.words import plural, ranks, size_text

FORMAT = 1
KEPT = 3
"""Automatic snapshots of a run that stay; those that a user has named all stay."""
_MANIFEST = "snapshot.json"
_BLOBS = "blobs"
_PARTIAL = ".partial"
_DIGEST_BYTES = 20
_LEFT = 3600.0  # seconds after which an unfinished snapshot is removed
_NAME = re.compile(r"[^\x00-\x1f/]{1,120}")


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot: ``about`` is its manifest."""

    path: Path
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The user's name for it; ``RUN@STEP`` for an automatic one."""
        return str(self.about["name"])

    @property
    def size(self) -> int:
        return len(self.about["ranks"])

    @property
    def step(self) -> int | None:
        """The step of the run in which it was made; None between runs."""
        return self.about["ranks"][0]["step"] if self.about.get("run") else None

    @property
    def bytes(self) -> int:
        """Its size on disk; memory that several snapshots share counts in each."""
        blobs = {name: size for rank in self.about["ranks"] for name, size in rank["blobs"].items()}
        total: int = sum(blobs.values()) + sum(rank["bytes"] for rank in self.about["ranks"])
        return total


def root() -> Path:
    """The folder of this notebook's snapshots."""
    return runs_directory().parent / "snapshots"


class _Cell(Protocol):
    """A run of a set-up cell."""

    run: str
    name: str
    size: int
    source: str
    options: dict[str, Any]
    environment: dict[str, Any]
    started: float


def about(name: str, setup: Sequence[_Cell] = ()) -> dict[str, Any]:
    """The manifest of a snapshot of this name; ``setup`` are the runs of the set-up cells.

    An empty name stands for run and step. Raises RingError for a name that is not allowed.
    """
    fields = _Cell.__annotations__
    cells = [{field: getattr(one, field) for field in fields} for one in setup]
    return {"name": _checked(name) if name else "", "python": python_version(), "setup": cells}


def python_version() -> str:
    """The Python version, because no other can load functions and classes of cells."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise RingError(f"{name!r:.140} is no name of a snapshot: use up to 120 characters, without / and line breaks")
    return name


def check_folder(folder: Path) -> None:
    """Raise RingError if another user could change what is in ``folder``: loading a snapshot runs code."""
    if how := changed_by_others(folder):
        raise RingError(f"{how}: a user who can change a snapshot can run code as you when you load it")


def found(folder: Path) -> tuple[list[Snapshot], list[str]]:
    """The snapshots of ``folder``, oldest first, and a line about each that is torn or of another user."""
    whole, torn = [], []
    for path in sorted(folder.glob(f"*/{_MANIFEST}"), key=lambda path: path.parent.name):
        if path.parent.name.startswith("."):
            continue
        try:
            whole.append(read(path.parent))
        except (RingError, OSError, ValueError, KeyError, TypeError) as error:
            torn.append(f"{path.parent}: {error}")
    return sorted(whole, key=lambda one: one.about["time"]), torn


def find(folder: Path, name: str) -> Snapshot:
    """The newest snapshot called ``name``. Raises RingError where there is none that is whole."""
    check_folder(folder)
    whole, torn = found(folder)
    named = [one for one in whole if one.name == name]
    if named:
        return named[-1]
    known = ", ".join(dict.fromkeys(one.name for one in reversed(whole))) or "none"
    why = "".join(f"; not readable: {line}" for line in torn)
    raise RingError(f"no snapshot {name!r} in {folder}; there are: {known}{why}")


def read(path: Path) -> Snapshot:
    """The snapshot in the folder ``path``. Raises RingError when it is torn or of another user, FileNotFoundError."""
    check_folder(path)
    with open_own(path / _MANIFEST) as file:
        if not is_whole(file):
            raise RingError("its manifest is torn")
        about, _ = json.JSONDecoder().raw_decode(file.read().decode(errors="ignore"))
    if about["format"] != FORMAT:
        raise RingError(f"it has format {about['format']}, this version reads {FORMAT}")
    for number, rank in enumerate(about["ranks"]):
        _check_length(path / rank_file(number), rank["bytes"])
        for digest, size in rank["blobs"].items():
            _check_length(path / _BLOBS / digest, size)
    return Snapshot(path, about)


def _check_length(path: Path, wanted: int) -> None:
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        raise RingError(f"it is torn: {path.name} is missing") from None
    if length != wanted:
        raise RingError(f"it is torn: {path.name} has {length} bytes of {wanted}")


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pickle"


def remove(snapshot: Snapshot) -> None:
    """Remove a snapshot. One that is half removed is torn, because its manifest goes first."""
    (snapshot.path / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(snapshot.path, ignore_errors=True)  # another process may be removing it too


class Writer:
    """Writes one rank's part of the snapshot ``id`` into ``folder``; the last of ``size`` ranks makes it whole."""

    def __init__(self, folder: Path, id: str, rank: int, size: int) -> None:
        self._folder, self._id, self._rank, self._size = folder, id, rank, size
        self._partial = folder / f".{id}{_PARTIAL}"
        self.blobs: dict[str, int] = {}
        self._unsynced: list[Path] = []
        self.written = 0
        """Bytes of memory that this rank has written itself."""
        make_private_folder(folder)
        check_folder(folder)
        make_private_folder(self._partial / _BLOBS)
        self._before = [one.path / _BLOBS for one in found(folder)[0]][::-1]

    def put(self, data: memoryview) -> str:
        """Keep these bytes; returns the name by which `read_blob` finds them."""
        digest = blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
        self.blobs[digest] = data.nbytes
        target = self._partial / _BLOBS / digest
        if target.exists() or self._linked(target, data.nbytes):
            return digest
        claim = target.with_name(f"{digest}{_PARTIAL}")
        try:
            file = open(claim, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        except FileExistsError:  # another rank writes it
            return digest
        if target.exists():  # another rank has just written it
            file.close()
            claim.unlink()
            return digest
        with file:
            file.write(data)
        claim.rename(target)
        self._unsynced.append(target)
        self.written += data.nbytes
        return digest

    def _linked(self, target: Path, size: int) -> bool:
        for blobs in self._before:
            source = blobs / target.name
            try:
                if source.stat().st_size == size and is_own(source):
                    os.link(source, target)
                    return True
            except FileExistsError:  # another rank was faster
                return True
            except OSError:  # removed meanwhile, or a disk without links
                continue
        return False

    def finish(self, content: bytes, about: Mapping[str, Any], report: Mapping[str, Any]) -> Snapshot | None:
        """Write this rank's file. The last rank also writes the manifest, and returns the snapshot.

        ``about`` is the same on all ranks, ``report`` is this rank's own.
        """
        for path in self._unsynced:  # now, while the disk is busy with all of them
            _sync(path)
        target = self._partial / rank_file(self._rank)
        with whole_file(target, private=True) as file:
            file.write(content)
        own = {**report, "bytes": target.stat().st_size, "blobs": self.blobs}
        with whole_file(self._partial / f"rank-{self._rank}.json", private=True) as file:
            file.write(json.dumps(own).encode())
        return self._make_whole(about)

    def _make_whole(self, about: Mapping[str, Any]) -> Snapshot | None:
        files = [self._partial / f"rank-{rank}.json" for rank in range(self._size)]
        if not all(file.exists() for file in files):
            return None
        with suppress(FileNotFoundError), _locked(self._partial):
            reports = [json.JSONDecoder().raw_decode(file.read_text(errors="ignore"))[0] for file in files]
            name = about["name"] or f"{about['run']['name']}@{reports[0]['step']}"
            whole = {**about, "name": name, "format": FORMAT, "time": time.time(), "ranks": reports}
            if len(points := {report["point"] for report in reports}) > 1:
                raise RingError(
                    f"no snapshot: the ranks were at different steps, {min(points)} and {max(points)}, because some "
                    "took a batch alone; earlier snapshots stay"
                )
            if not self._all_blobs(reports):
                return None
            with whole_file(self._partial / _MANIFEST, private=True) as file:
                file.write(json.dumps(whole).encode())
            for report in files:
                report.unlink()
            snapshot = Snapshot(self._folder / self._id, whole)
            with _locked(self._folder):  # of two completed at once, the later replaces the other
                self._partial.rename(snapshot.path)
                _sync(self._folder)
                _prune(self._folder, snapshot)
            return snapshot
        return None

    def _all_blobs(self, ranks: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all memory is there: a rank that wrote some of it for others may have died."""
        return all((self._partial / _BLOBS / digest).exists() for rank in ranks for digest in rank["blobs"])

    def give_up(self) -> None:
        """Remove what the ranks have written; the other snapshots stay."""
        shutil.rmtree(self._partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A context that locks the folder at ``path`` against other processes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # no locks here
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, newest: Snapshot) -> None:
    """Remove what ``newest`` replaces: snapshots of its name, older automatic ones of its run, and torn ones."""
    whole, _ = found(folder)
    others = [one for one in whole if one.path != newest.path]
    old = [one for one in others if one.name == newest.name]
    if newest.about.get("automatic"):
        run = newest.about["run"]["id"]
        own = [one for one in others if one.about.get("automatic") and one.about["run"]["id"] == run and one not in old]
        old += own[: max(0, len(own) + 1 - KEPT)]
    for one in old:
        remove(one)
    for path in folder.iterdir():
        with suppress(OSError):
            if path.name.endswith(_PARTIAL) and is_own(path) and time.time() - path.stat().st_mtime > _LEFT:
                shutil.rmtree(path)


def read_blob(snapshot: Path, digest: str, into: memoryview) -> None:
    """Read bytes of `Writer.put` into ``into``, of the same length. Raises RingError when they are damaged."""
    at = 0
    with open_own(snapshot / _BLOBS / digest) as file:
        while at < into.nbytes and (count := file.readinto(into[at:])):  # type: ignore[attr-defined]
            at += count
    if at < into.nbytes or blake2b(into, digest_size=_DIGEST_BYTES).hexdigest() != digest:
        raise RingError(f"{snapshot / _BLOBS / digest} is damaged: its content does not match its digest")


def read_rank(snapshot: Path, rank: int) -> bytes:
    """What `Writer.finish` has written for a rank. Raises RingError when it is damaged."""
    path = snapshot / rank_file(rank)
    with open_own(path) as file:
        if not is_whole(file):
            raise RingError(f"{path} is damaged: its content does not match its checksum")
        return file.read()


def explained(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOENT:
        return f"the snapshot in {folder} was given up by another rank; those before it are kept"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"there is no room for the snapshot in {folder} ({error.strerror}); those before it are kept"
    return f"the snapshot could not be written to {folder}: {error.strerror or error}; those before it are kept"


def kept_text(snapshot: Snapshot) -> str:
    """What a snapshot keeps and what it leaves out, as lines."""
    reports = snapshot.about["ranks"]
    names = {name for rank in reports for name in rank["names"]}
    seconds = max(rank["seconds"] for rank in reports)
    written = sum(rank["written"] for rank in reports)
    text = (
        f"Kept {plural(len(names), 'variable')} of {plural(snapshot.size, 'rank')} as {snapshot.name}: "
        f"{size_text(snapshot.bytes)} in {seconds:.1f} s, of which {size_text(written)} of memory were new."
    )
    return "\n".join([text, *by_reason("Left out", reports, "left_out"), *by_reason("Kept without", reports, "loses")])


def by_reason(what: str, reports: Sequence[Any], key: str) -> list[str]:
    """Lines with names and reasons, and with the ranks unless all ranks agree."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        for name, why in report[key].items():
            found.setdefault((name, why), []).append(rank)
    if key == "loses":
        names: dict[str, list[str]] = {}
        for name, why in found:
            names.setdefault(why, []).append(name)
        return [f"{what} {why}: {', '.join(dict.fromkeys(all))}." for why, all in names.items()]
    everywhere = len(reports)
    return [
        f"{what}: {name}, {why}{'' if len(where) == everywhere else f' ({ranks(where)})'}."
        for (name, why), where in found.items()
    ]
