"""Handles of operations under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_notebook import _core

__all__ = ["Work"]


class Work:
    """One operation under way. Horovod calls it a handle."""

    __slots__ = ("_keep", "_native", "waited")

    def __init__(self, native: _core.Work, keep: Any) -> None:
        self._native = native
        self._keep = keep  # the memory that the operation reads and writes
        self.waited = False  # `wait` has returned or raised: what takes less time to ask than `done`

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation has completed, or raise its error.

        Interruptible; releases the GIL. ``timeout`` is in seconds and raises CollectiveTimeout (which aborts the
        epoch: a timed-out operation cannot be taken back).
        """
        try:
            self._native.wait(timeout or 0.0)
        finally:
            self._keep = None  # nobody touches the memory any more
            self.waited = True

    def done(self) -> bool:
        """Whether `wait` would return at once (also when the operation failed)."""
        return self._native.done()

    def output(self) -> memoryview:
        """The bytes that an allgather or alltoall produced; they stay valid as long as the view lives."""
        return memoryview(self._native.output())

    def counts(self) -> list[int]:
        """Elements that came from each rank, in group order (allgather, alltoall)."""
        return self._native.counts()

    def placed(self) -> bool:
        """Whether all of it lies in the outputs that were given (allgather, alltoall); else it is in `output`."""
        return self._native.placed()

    def check_names(self) -> None:
        """Raise the error of the first operation by name in which this rank, having joined, has no part (join)."""
        self._native.check_names()

    def last_rank(self) -> int:
        """The group rank that joined last (join)."""
        return self._native.last_joined()
