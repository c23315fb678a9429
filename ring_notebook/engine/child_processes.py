"""Ends the processes that a cell has started and, failing or interrupted, left behind."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

__all__ = ["end_children"]

_SECONDS_TO_TERMINATE = 0.5


def end_children(kept: Iterable[BaseProcess]) -> None:
    """End all multiprocessing children but ``kept``: a data loader would wait 5 s for a worker that is busy.

    Returns when they are gone.
    """
    left = [child for child in multiprocessing.active_children() if child not in set(kept)]
    if not left:
        return
    # A data loader's handler would raise here that its worker was killed.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for child in left:
            child.terminate()
        for child in left:
            child.join(_SECONDS_TO_TERMINATE)
            if child.is_alive():
                child.kill()
                child.join()
    finally:
        signal.signal(signal.SIGCHLD, before)
