"""Elastic training without a framework: the loop, the base of states, and where commits lie on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from hashlib import blake2b
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from ring_notebook.api.basics import barrier, init, rank, shutdown
from ring_notebook.api.foreign_calls import original
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.process_sets import register_again, registered_sets
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import HorovodInternalError, HostsUpdatedInterrupt

R = TypeVar("R")

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...))


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
        """Adapt to the ranks of a new generation."""

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


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator for ``func(state, ...)``: run it to its end, starting again from the last commit when ranks fail.

    It starts with ``state.sync()``. After HorovodInternalError (a collective failed: aborted, timed out, another rank
    left or died) the state goes back to its last commit; after HostsUpdatedInterrupt it stays. Then a new generation is
    opened with the ranks that are there, process sets are registered again, ``state.on_reset()`` is called, and
    ``func`` starts again. A failure that occurs twice without a commit or a death in between is raised, since it
    would occur again. All other exceptions are raised at once.

    In a job of ``ringrun --elastic`` the surviving ranks continue, on all hosts: they are renumbered from 0, and a
    process set keeps its surviving members. Elsewhere the death of a rank ends the job. With ``--max-np`` new ranks
    join at the next commit, at which HostsUpdatedInterrupt is raised; ``state.sync()`` gives them what rank 0 has.

    In a notebook, and where ``RING_COMMIT_DIR`` names a folder, commits are on disk too, and stay there until ``func``
    returns. A training that was killed, stopped, or raised anything resumes from there when the same function is
    started again, in a script with the same command line; a changed one starts from the beginning. Raises TypeError
    when ``func`` cannot be called, or is not given a state. (Horovod: ``elastic.run``.)
    """
    if not callable(func):
        raise TypeError(f"elastic.run decorates a function, got {type(func).__name__}")

    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise TypeError(f"{_name_of(func)} takes an elastic.State first, got {type(state).__name__}")
        path = commit_path(func)
        if world.has_just_joined():  # the other ranks are training, and have loaded the commit
            if path is not None:
                state.keep_on_disk(path, load=False)
        elif path is not None and state.keep_on_disk(path) and rank() == 0:
            print(f"{_name_of(func)}: resuming from {path}; delete it to restart")  # noqa: T201
        ranks, sets = world.current().ranks, registered_sets()
        failed_at: tuple[int, tuple[int, ...]] | None = None
        again = skip_sync = False
        while True:
            try:
                if again:
                    shutdown()
                    init(list(ranks))
                    ranks = world.current().ranks
                    register_again(sets)
                    state.on_reset()
                    sets, again = registered_sets(), False
                return _train(func, state, skip_sync, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except Exception as error:
                if not isinstance(original(error) or error, HorovodInternalError):
                    raise
                failing = state.commits, ranks
                if failed_at == failing:
                    raise
                failed_at = failing
                state.restore()
                skip_sync = False
            if not again:
                sets = registered_sets()
            again = True

    return wrapper


def _train(func: Callable[..., R], state: State, skip_sync: bool, *args: Any, **kwargs: Any) -> R:
    if not skip_sync:
        state.sync()
    result = func(state, *args, **kwargs)
    # A rank that failed at the very end needs the others once more.
    barrier()
    state.remove_from_disk()
    return result


def commit_path(func: Callable[..., Any]) -> Path | None:
    """The file of ``func``'s commits, if they go to disk.

    It differs for another function of this name, a changed one, and a script with another command line.
    """
    run = world.current().run
    folder = config().commit_dir or (".ring/commits" if run is not None else "")
    if not folder:
        return None
    # An engine's command line says nothing of the cells that run in it.
    script = (*(Path(name).name for name in sys.argv[:1]), *sys.argv[1:]) if run is None else ()
    text = f"{_text_of(func)} {script!a}"
    return Path(folder) / f"{_name_of(func)}-{blake2b(text.encode(), digest_size=4).hexdigest()}.pt"


def _name_of(func: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return str(getattr(func, "__name__", type(func).__name__))


def _text_of(value: Any) -> str:
    """A text for ``value`` that depends on its source only: not on the process, the file or the line."""
    if isinstance(value, _CONSTANTS):
        return ascii(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text_of, value))})"
    if isinstance(value, (set, frozenset)):  # each process has an order of its own
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if isinstance(value, dict):
        return _text_of(tuple(value.items()))
    if isinstance(value, CodeType):
        return _text_of((value.co_code, value.co_names, value.co_freevars, value.co_consts))
    if isinstance(value, partial):
        return _text_of((value.func, value.args, value.keywords))
    function = unwrap(value) if callable(value) else value
    if hasattr(function, "__code__"):
        return _text_of((function.__code__, function.__defaults__, function.__kwdefaults__))
    return str(getattr(value, "__qualname__", type(value).__qualname__))  # a repr may have an address
