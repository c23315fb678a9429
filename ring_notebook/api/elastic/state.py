"""The base of elastic states: what a subclass defines, and commits, host updates and resets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import HostsUpdatedInterrupt


class State:
    """Base of states (Horovod: ``State``): a subclass says what it is to `save`, `restore` and `sync`.

    A subclass that overrides ``__init__`` calls this one. Commits are in memory only, unless it also has `write` and
    `keep_on_disk`.
    """

    def __init__(self) -> None:
        self.commits = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._hosts_updated = False

    def save(self) -> None:
        """Keep the present values in memory, as those to go back to."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the values that were kept last. Must not call collectives: they have just failed."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's values on all ranks, and keep them."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks of a new epoch."""

    def commit(self) -> None:
        """`save`, to disk too where there is a folder for commits, and `check_host_updates`. All ranks must call it."""
        self.save()
        self.commits += 1
        self.write()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks when new ranks wait to join, or `on_hosts_updated` was called."""
        updated, self._hosts_updated = int(self._hosts_updated or world.is_updated()), False
        if allreduce_numbers([updated], ReduceOp.MAX, "host updates") != [0]:
            raise HostsUpdatedInterrupt

    def on_hosts_updated(self) -> None:
        """Note that hosts were added or removed; the next `commit` raises HostsUpdatedInterrupt on all ranks."""
        self._hosts_updated = True

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call whenever training starts again with another set of ranks."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """`reset`, then the callbacks; `run` calls this when training starts again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def write(self) -> None:
        """Write what `save` has kept to the path that `keep_on_disk` was given."""

    def keep_on_disk(self, path: Path, load: bool = True) -> bool:
        """Write commits to ``path`` too. Returns whether one was there to ``load``; all ranks have then loaded it."""
        return False

    def remove_from_disk(self) -> None:
        """Delete the commit on disk: the training has ended."""
