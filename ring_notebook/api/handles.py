"""Handles of asynchronous collectives: poll, synchronize, and names, each used by one operation at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core


class Waitable(Protocol):
    """An operation that a handle waits for: of the core, on a device, or another handle."""

    def wait(self) -> Any:
        """Return when the operation has completed. Raises its error."""

    def done(self) -> bool:
        """Whether the operation has ended, so that `wait` does not wait."""


class Handle:
    """One asynchronous collective that is running; `synchronize` returns its result."""

    __slots__ = ("_claim", "_finish", "_result", "_works")

    def __init__(
        self,
        communicator: Communicator | None,
        name: str,
        works: Sequence[Waitable],
        finish: Callable[[], Any],
    ) -> None:
        """``finish`` runs once, when all of ``works`` have completed, and makes the result."""
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._claim = _Claim(communicator, name) if name else None

    def only(self) -> Handle:
        """This handle, with the only item of its result as the result."""
        finish = self._finish
        if finish is not None:
            self._finish = lambda: finish()[0]
        return self

    def done(self) -> bool:
        """Whether the operation has ended, also by an error."""
        return all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Wait for the collective and return its result. Raises its error. May be called again."""
        finish = self._finish  # another waiting thread may set it to None
        if finish is not None:
            try:
                for work in self._works:
                    work.wait()
            finally:
                self._claim = None
            self._result = finish()
            self._finish = None
        return self._result


class _Claim:
    """A name in use, until its handle was waited for or dropped."""

    __slots__ = ("_key",)

    def __init__(self, communicator: Communicator | None, name: str) -> None:
        self._key = (id(communicator), name)
        _named[self._key] = id(self)

    def __del__(self) -> None:
        if _named.get(self._key) == id(self):
            del _named[self._key]


# Names in use, by claim. A plain dict, because all operations use it, also those that take microseconds.
_named: dict[tuple[int, str], int] = {}


def check_name(communicator: Communicator, name: str | None) -> str:
    """``name`` or "". Raises TypeError unless it is a string, ValueError while an operation of that name is running."""
    if not name:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if (id(communicator), name) in _named:
        raise ValueError(
            f"rank {communicator.rank}: an operation named {name!r} is already running; call synchronize() on its "
            "handle first, or choose another name"
        )
    return name


def member_name(name: str | None, index: int) -> str | None:
    """Name of operation ``index`` of a group called ``name``."""
    return f"{name}.{index}" if name else None


def together(handles: Sequence[Waitable]) -> Handle:
    """One handle for several; its result is the list of their results."""
    return Handle(None, "", handles, lambda: [handle.wait() for handle in handles])


@lru_cache(maxsize=1)
def _kinds() -> tuple[type, ...]:
    """The types of handles that functions which start a collective return."""
    return Handle, core.TensorWork


def _check_handle(handle: Any, function: str) -> None:
    if not isinstance(handle, _kinds()):
        raise TypeError(f"{function} takes the handle that an _async collective returned, got {type(handle).__name__}")


def poll(handle: Waitable) -> bool:
    """Whether the collective has ended, so that `synchronize` would not wait (Horovod: ``poll``).

    True also after a failure, which `synchronize` raises. Raises TypeError for anything but a handle.
    """
    _check_handle(handle, "poll")
    return handle.done()


def synchronize(handle: Waitable) -> Any:
    """Wait for an asynchronous collective and return its result (Horovod: ``synchronize``).

    The result is a tensor, a list of tensors for a grouped collective, or as documented for the function that started
    it.

    Raises the collective's error (CollectiveMismatch, CollectiveAborted, CollectiveTimeout) and KeyboardInterrupt;
    TypeError for anything but a handle.
    """
    if not isinstance(handle, _kinds()):
        _check_handle(handle, "synchronize")
    return handle.wait()
