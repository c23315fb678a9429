"""The folders of checkpoints: the names in them, which ones are whole, and how one is added or removed."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.files.private_files import make_private_folder
from ring_notebook.files.whole_file import checked, whole_file

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints, in the folder of a run."""
REST = "rest.pt"
"""The file that rank 0 writes last in a checkpoint of all ranks: it marks the checkpoint as whole."""
_ELSEWHERE = "elsewhere.json"
"""In the folder of a run: which checkpoints its training has in another folder, or at a URL."""
SECOND = "-2"
"""After the name of a checkpoint that is whole while the one that it replaces still has this name."""
_NAME = re.compile(rf"step-(\d+)(-best)?(?:{SECOND})?(\.pt|\.pickle)?$")


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint; ``path`` is a URL if its folder is one."""

    step: int
    best: bool
    path: Path | str


def name_of(step: int, best: bool, suffix: str) -> str:
    """The name of the checkpoint after ``step`` steps; a folder of shards has no ``suffix``."""
    return f"step-{step:08}{'-best' * best}{suffix}"


def step_of(name: str) -> tuple[int, bool] | None:
    """The step in the ``name`` of a checkpoint, and whether it is marked as the best; None for another name."""
    match = _NAME.match(name)
    return (int(match[1]), bool(match[2])) if match else None


def found(folder: Path) -> list[Found]:
    """The checkpoints of a folder, the one that was written last at the end; none where there is no folder.

    An earlier training may have left some there that had made more steps.
    """
    there = []
    for path in folder.glob("step-*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            if named := step_of(path.name):
                there.append((path.stat().st_mtime_ns, Found(*named, path)))
    return [one for _, one in sorted(there, key=lambda pair: (pair[0], pair[1].step))]


def found_of_run(folder: Path) -> list[Found]:
    """As `found`, for the folder of a run, with the checkpoints that its training has elsewhere."""
    try:
        rows = json.loads(checked((folder / _ELSEWHERE).read_bytes()))
    except FileNotFoundError:
        rows = []
    elsewhere = [Found(step, best, path) for step, best, path in rows if "://" in path or Path(path).exists()]
    return [*found(folder), *elsewhere]


def note_elsewhere(folder: Path, there: list[Found]) -> None:
    """Have `found_of_run` list ``there``."""
    make_private_folder(folder)
    rows = [(one.step, one.best, str(one.path.absolute() if isinstance(one.path, Path) else one.path)) for one in there]
    with whole_file(folder / _ELSEWHERE) as file:
        file.write(json.dumps(rows).encode())


class LocalFolder:
    """A folder of this host, or of a disk that all hosts share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def found(self) -> list[Found]:
        return found(self.path)

    def unmark_best(self, one: Found) -> None:
        """Make ``one`` an ordinary checkpoint."""
        path = Path(one.path)
        self._give_name(path, path.with_name(name_of(one.step, False, path.suffix)))

    def remove(self, one: Found) -> None:
        self._remove(Path(one.path))

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. A folder is renamed first, since it would count as whole until its last file is gone."""
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        left = path.rename(self._partial(path.name))
        shutil.rmtree(left, ignore_errors=True)  # `begin` tries again

    def _partial(self, name: str) -> Path:
        return self.path / f".{name}.{secrets.token_hex(4)}.partial"

    def _give_name(self, path: Path, target: Path) -> None:
        """Rename ``path`` to ``target``, in place of an older one; either is whole if this is cut off.

        No folder can be renamed onto another one, so the new one has a second name meanwhile.
        """
        if not path.is_dir():
            path.replace(target)
            return
        second = target.with_name(f"{target.name}{SECOND}")
        if path != second and second.exists():  # this was cut off before
            self._remove(target)
            second.rename(target)
        if target.exists():
            path = path.rename(second)
            self._remove(target)
        path.rename(target)

    def begin(self, step: int) -> str:
        """A new folder in which all ranks write the checkpoint after ``step`` steps; removes what others have left."""
        make_private_folder(self.path)
        for left in self.path.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        # A new name, because a thread of an earlier attempt may still write.
        partial = self._partial(name_of(step, False, ""))
        make_private_folder(partial)
        return str(partial)

    def has(self, begun: str, name: str) -> bool:
        """Whether a file is in the folder that `begin` has made."""
        return Path(begun, name).exists()

    def complete(self, begun: str, step: int, best: bool, rest: bytes) -> Found:
        """Write ``rest`` as the last file in ``begun``, and give the folder its name, in place of an older one."""
        with whole_file(Path(begun, REST), private=True) as file:
            file.write(rest)
        target = self.path / name_of(step, best, "")
        self._give_name(Path(begun), target)
        return Found(step, best, target)

    def discard(self, begun: str) -> None:
        """Remove what was written in ``begun``, as far as that is possible."""
        shutil.rmtree(begun, ignore_errors=True)
