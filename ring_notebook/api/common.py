"""The names that all faces share: Horovod's functions without tensors, and what logs and reports."""

from __future__ import annotations

from ring_notebook.api import basics
from ring_notebook.api.basics import *  # noqa: F403 - all of it is Horovod's
from ring_notebook.api.counts import counts
from ring_notebook.api.objects import allgather_object, broadcast_object
from ring_notebook.api.only import only
from ring_notebook.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ring_notebook.core.metrics import log, log_params, track
from ring_notebook.core.steering import knob
from ring_notebook.core.step_guard import step
from ring_notebook.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    HorovodInternalError,
    HostsUpdatedInterrupt,
)

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ProcessSet",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "counts",
    "global_process_set",
    "knob",
    "log",
    "log_params",
    "only",
    "remove_process_set",
    "step",
    "track",
]
__all__ += basics.__all__


def absent(face: str, name: str, instead: str) -> AttributeError:
    """The error for a name that only another face has, with what to use ``instead``: for a module's ``__getattr__``."""
    about = f"; {instead}" if name in ("save", "load") else ""
    return AttributeError(f"module {face!r} has no attribute {name!r}{about}", name=name)
