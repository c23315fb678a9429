"""A state of values under names: commits in memory and on disk, going back to the last one, sync from rank 0."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cloudpickle

from ring_notebook.api.basics import rank
from ring_notebook.api.elastic_training import State
from ring_notebook.api.objects import broadcast_object
from ring_notebook.api.rank_0_files import read_on_rank_0, write_on_rank_0
from ring_notebook.errors import HorovodInternalError, RingError
from ring_notebook.text.error_text import error_text


class ObjectState(State):
    """Keeps the values that are given as attributes of their names (Horovod: ``ObjectState``).

    Values that have ``state_dict`` and ``load_state_dict`` are kept by these, all others by copies. Subclasses say how
    they keep others (`content_of`, `load_content`) and in which files (`write`, `read_on_all`). Raises ValueError for
    a name that the state itself needs.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        taken = [name for name in values if name.startswith("_") or hasattr(self, name)]
        if taken:
            raise ValueError(f"a {type(self).__name__} needs {', '.join(taken)} itself; choose another name")
        for name, value in values.items():
            setattr(self, name, value)
        self._names = list(values)
        self._path: Path | None = None
        self.save()

    def content_of(self, value: Any) -> Any:
        """The content of ``value`` to keep; it may share memory with ``value``."""
        return value.state_dict() if _is_stateful(value) else value

    def load_content(self, name: str, content: Any) -> None:
        """Load ``content``, from `content_of`, into the value of this name."""
        value = getattr(self, name)
        if _is_stateful(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)

    def save(self) -> None:
        """Keep the present values in memory, as those to go back to."""
        self._saved = {name: copy.deepcopy(self.content_of(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Go back to the values that were kept last."""
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them."""
        own = {name: self.content_of(getattr(self, name)) for name in self._names}
        # The commits too: a death may have kept some ranks from making the newest one.
        contents, self.commits = broadcast_object((own, self.commits), name="elastic state")
        if rank() != 0:
            self._load(contents)
        self.reset()
        self.save()

    def write(self) -> None:
        """Write what `save` has kept to disk, if there is a folder for commits."""
        if self._path is not None:
            write_on_rank_0(self._path, lambda file: cloudpickle.dump(self._saved, file), private=True)

    def keep_on_disk(self, path: Path, load: bool = True) -> bool:
        """Write commits to ``path`` too. Returns whether rank 0 found one to ``load``; all ranks have then loaded it.

        Raises RingError on all ranks when it is damaged, and when another user wrote it: a pickle runs code when it is
        loaded.
        """
        self._path = path
        found = load and broadcast_object(path.exists(), name="elastic resume")
        if found:
            try:
                self._load(self.read_on_all(path))
            except HorovodInternalError:  # another rank has failed
                raise
            except Exception as error:
                raise RingError(
                    f"rank {rank()}: the commit {path} cannot be used: {type(error).__name__}: {error_text(error)}; "
                    "remove it, or set RING_COMMIT_DIR to another folder of your own, and the training begins anew"
                ) from error
            self.save()
        return bool(found)

    def read_on_all(self, path: Path) -> Any:
        """Rank 0 reads ``path``; returns the content on all ranks."""
        return read_on_rank_0(path, cloudpickle.load, private=True)

    def remove_from_disk(self) -> None:
        """Delete the commit on disk: the training has ended."""
        if self._path is not None and rank() == 0:
            self._path.unlink(missing_ok=True)

    def _load(self, contents: dict[str, Any]) -> None:
        for name, content in contents.items():
            self.load_content(name, content)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
