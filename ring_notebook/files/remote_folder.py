"""A folder of checkpoints at any place that fsspec knows, such as a bucket: no file in it can be renamed for free."""

from __future__ import annotations

import importlib
import io
from typing import Any

from ring_notebook.files.checkpoint_folder import REST, SECOND, Found, name_of, step_of
from ring_notebook.files.whole_file import checked, with_checksum

_BEST = "best"  # an empty file that marks the best, since nothing can be renamed
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""The keys under which file systems give the time of the last change."""


class RemoteFolder:
    """As `LocalFolder`, over a URL. A checkpoint there is whole when it has its file `REST`, which appears at once.

    Keys, regions and endpoints are those that fsspec finds in its own files and variables, such as
    ``FSSPEC_S3_ENDPOINT_URL``. Raises ValueError for a URL that fsspec does not know, or for which it lacks a package.
    """

    def __init__(self, url: str) -> None:
        try:
            core: Any = importlib.import_module("fsspec.core")
            self.file_system, self._root = core.url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"checkpoint: folder={url!r} cannot be used: {error}; install what fsspec needs for it (s3fs for "
                "s3://, gcsfs for gs://), or take a folder that all hosts share"
            ) from error
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def inside(self, url: str) -> str:
        return f"{self._root}{url.removeprefix(self._url)}"

    def _files(self) -> dict[str, dict[str, Any]]:
        """All files of checkpoints there, by checkpoint and file name."""
        self.file_system.invalidate_cache()
        try:
            there: dict[str, Any] = self.file_system.find(self._root, maxdepth=2, detail=True)
        except FileNotFoundError:
            return {}
        files: dict[str, dict[str, Any]] = {}
        for path, about in there.items():
            *_, step, name = path.split("/")
            if step_of(step):
                files.setdefault(step, {})[name] = about
        return files

    def found(self) -> list[Found]:
        """The whole checkpoints, the last written at the end."""
        there = []
        for name, files in self._files().items():
            if REST in files and (named := step_of(name)):
                there.append((_time_of(files[REST]), Found(named[0], _BEST in files, f"{self._url}/{name}")))
        return [one for _, one in sorted(there, key=lambda pair: (pair[0], pair[1].step))]

    def unmark_best(self, one: Found) -> None:
        self.file_system.rm(f"{self.inside(str(one.path))}/{_BEST}")

    def remove(self, one: Found) -> None:
        """Remove ``one``, its mark as whole first."""
        self._remove(self.inside(str(one.path)))

    def _remove(self, path: str) -> None:
        self.file_system.invalidate_cache()
        if self.file_system.exists(f"{path}/{REST}"):
            self.file_system.rm(f"{path}/{REST}")
        if self.file_system.exists(path):
            self.file_system.rm(path, recursive=True)

    def begin(self, step: int) -> str:
        """The URL at which all ranks write the checkpoint after ``step`` steps; removes what is not whole.

        A whole one of this step keeps its name until `complete`, and the new one gets the other of two names.
        """
        for left, files in self._files().items():
            if REST not in files:
                self._remove(f"{self._root}/{left}")
        *older, last = ["", *(str(one.path) for one in self.found() if one.step == step)]
        for url in filter(None, older):  # `complete` was cut off
            self._remove(self.inside(url))
        name = name_of(step, False, "")
        name = f"{name}{SECOND}" if last == f"{self._url}/{name}" else name
        self.file_system.makedirs(f"{self._root}/{name}", exist_ok=True)
        return f"{self._url}/{name}"

    def has(self, begun: str, name: str) -> bool:
        """Whether a file is there that a rank has written."""
        self.file_system.invalidate_cache()
        there: bool = self.file_system.exists(f"{self.inside(begun)}/{name}")
        return there

    def complete(self, begun: str, step: int, best: bool, rest: bytes) -> Found:
        """Mark what was written at ``begun`` as whole, by ``rest`` as the last file; then remove an older one."""
        if best:
            self.file_system.pipe_file(f"{self.inside(begun)}/{_BEST}", b"")
        self.file_system.pipe_file(f"{self.inside(begun)}/{REST}", with_checksum(rest))
        for one in self.found():
            if one.step == step and one.path != begun:
                self.discard(str(one.path))
        return Found(step, best, begun)

    def discard(self, begun: str) -> None:
        """Remove what was written at ``begun``, as far as that is possible."""
        try:
            self._remove(self.inside(begun))
        except Exception:  # whatever the place raises: the next `begin` tries again
            return

    def rest_of(self, url: str) -> io.BytesIO:
        """The file `REST` of the checkpoint at ``url``. Raises ValueError where it is damaged."""
        return io.BytesIO(checked(self.file_system.cat_file(f"{self.inside(url)}/{REST}")))


def _time_of(about: dict[str, Any]) -> float:
    found = next((about[name] for name in _TIMES if about.get(name)), 0.0)
    return float(found.timestamp() if hasattr(found, "timestamp") else found)
