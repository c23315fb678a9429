"""What elastic.run needs of a state, and what all states do alike: commits, host updates, resets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ring_notebook.api.small_sums import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import HostsUpdatedInterrupt

__all__ = ["State"]


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
        """Look anew at which ranks there are."""

    def commit(self) -> None:
        """`save`, to disk too where there is a folder for commits, and `check_host_updates`. All ranks must call it."""
        self.save()
        self.commits += 1
        self.write()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks when `on_hosts_updated` was called on one."""
        updated, self._hosts_updated = int(self._hosts_updated), False
        if allreduce_numbers([updated], ReduceOp.MAX, "host updates") != [0]:
            raise HostsUpdatedInterrupt

    def on_hosts_updated(self) -> None:
        """Note that hosts have come or gone; the ranks learn of it at the next `commit`."""
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
        """Put what `save` has kept on disk too, where `keep_on_disk` has said to."""

    def keep_on_disk(self, path: Path) -> bool:
        """Put commits into ``path`` too. True when one was there, which now holds on all ranks."""
        return False

    def remove_from_disk(self) -> None:
        """Take the commit on disk away: the training has ended."""
