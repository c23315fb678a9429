"""elastic.run: train, and after a failure of the ranks go back to the last commit and train on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from ring_notebook.config import config
from ring_notebook.errors import HorovodInternalError, HostsUpdatedInterrupt
from ring_notebook.torch.basics import init, rank, shutdown
from ring_notebook.torch.elastic.state import TorchState

__all__ = ["run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator for ``func(state, ...)``: run it to its end, starting again from the last commit when ranks fail.

    It starts with ``state.sync()``. After HorovodInternalError (a collective failed: aborted, timed out, another rank
    left) the state goes back to its last commit; after HostsUpdatedInterrupt it stays. Then a new epoch is opened with
    the ranks that are there, ``state.on_reset()`` is called, and ``func`` starts again. A failure that comes twice
    without a commit between is raised: it would come for ever. All other exceptions are raised at once.

    Where ``RING_COMMIT_DIR`` names a folder, commits are on disk too, under the function's name, until ``func``
    returns: a training that was killed goes on from there when it is started again. (Horovod: ``elastic.run``.)
    """

    @wraps(func)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> R:
        folder = config().commit_dir
        if folder:
            path = Path(folder) / f"{func.__qualname__}.pt"
            if state.keep_on_disk(path) and rank() == 0:
                print(f"{func.__qualname__} goes on from {path}; delete it to start anew")  # noqa: T201
        failed_at = -1
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
                state.remove_from_disk()
                return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except HorovodInternalError:
                if failed_at == state.commits:
                    raise
                failed_at = state.commits
                state.restore()
                skip_sync = False
            shutdown()
            init()
            state.on_reset()

    return wrapper
