"""One rank of ``run``: fetches the function, calls it, and sends back what it reports, and its result or exception."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from ring_notebook.errors import CollectiveAborted
from ring_notebook.rank import exit_watch
from ring_notebook.rank.known_callers import Caller, call
from ring_notebook.rank.rank_status import rank_of_process

ADDRESS = "RING_RUN_ADDRESS"
KEY = "RING_RUN_KEY"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of the function on one rank.

    ``value`` is the pickled result, or the pickled exception when ``traceback`` is not empty. ``aborted`` is
    true when this rank only stopped because another one failed.
    """

    rank: int
    value: bytes
    traceback: str = ""
    aborted: bool = False


_launcher: Caller | None = None
_sends = threading.Lock()


def report(value: Any) -> None:
    """Send ``value`` to the process that called `run`, by cloudpickle, in the middle of the function.

    Raises RuntimeError outside of a rank of `run`.
    """
    if _launcher is None:
        raise RuntimeError("only a function that runs on ranks can report; this process is no rank of one")
    data = cloudpickle.dumps(value)
    with _sends:
        _launcher.send(data)


def main() -> int:
    """Entry point in each rank. Returns the exit code."""
    address, key = os.environ.pop(ADDRESS), os.environ.pop(KEY)
    global _launcher
    with call(address, key.encode()) as launcher:
        launcher.send(rank_of_process())
        path, function = launcher.recv()
        _import_as(path)
        _launcher = launcher
        outcome = _call(function)
        with _sends:
            _launcher = None
            launcher.send(outcome)
    return 1 if outcome.traceback else 0


def _import_as(path: list[str]) -> None:
    """Import from ``path`` too, the ``sys.path`` of the process that called `run`."""
    own = [folder for folder in sys.path if folder not in path]
    same_python = os.path.dirname(os.__file__) in path  # else the standard library of another Python would come first
    sys.path[:] = [*path, *own] if same_python else [*sys.path, *(one for one in path if one not in sys.path)]


def _call(function: bytes) -> Outcome:
    rank = rank_of_process()
    try:
        fn, args, kwargs = pickle.loads(function)
        with exit_watch.EndingForks():
            result = fn(*args, **kwargs)
        return Outcome(rank, _pickled(rank, result))
    except BaseException as error:
        return _failure(rank, error)


def _pickled(rank: int, result: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"rank {rank}: the function returned an object of {type(result).__qualname__} that cannot be pickled "
            f"({error}); return numbers, arrays or dicts of them"
        ) from error


def _failure(rank: int, error: BaseException) -> Outcome:
    if isinstance(error, SystemExit):
        _hide_watch(error)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        value = cloudpickle.dumps(error)
    except Exception:
        value = b""
    exit_watch.tell(error)  # before the launcher has the outcome: no other rank is to wait for this one
    return Outcome(rank, value, text, isinstance(error, CollectiveAborted))


def _hide_watch(error: SystemExit) -> None:
    """Remove the traceback's last frame if it is that of our `sys.exit`, in `exit_watch`."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        if tb.tb_next.tb_frame.f_code.co_filename == exit_watch.__file__:
            tb.tb_next = None
        tb = tb.tb_next
