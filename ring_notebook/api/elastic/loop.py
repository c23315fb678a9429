"""elastic.run: train, and after a failure of ranks restore the last commit and resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ring_notebook.api.basics import barrier, init, rank, shutdown
from ring_notebook.api.elastic.commits import commit_path, name_of
from ring_notebook.api.elastic.state import State
from ring_notebook.api.process_sets import register_again, registered_sets
from ring_notebook.core import world
from ring_notebook.errors import HorovodInternalError, HostsUpdatedInterrupt

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator for ``func(state, ...)``: run it to its end, starting again from the last commit when ranks fail.

    It starts with ``state.sync()``. After HorovodInternalError (a collective failed: aborted, timed out, another rank
    left or died) the state goes back to its last commit; after HostsUpdatedInterrupt it stays. Then a new epoch is
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
            raise TypeError(f"{name_of(func)} takes an elastic.State first, got {type(state).__name__}")
        path = commit_path(func)
        if world.has_just_joined():  # others who train, and have loaded what was there
            if path is not None:
                state.keep_on_disk(path, load=False)
        elif path is not None and state.keep_on_disk(path) and rank() == 0:
            print(f"{name_of(func)}: resuming from {path}; delete it to restart")  # noqa: T201
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
            except HorovodInternalError:
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
