"""Handles of operations under way."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ring_notebook.errors import CollectiveError

if TYPE_CHECKING:
    from ring_notebook import _core


_FEW = 8
_never_freed: list[object] = []
"""Memory that a kernel on a device, which could not be ended, may still touch."""


class Call:
    """The operations that one call of a user starts, equally many on every rank.

    If the numbers differ, the first operation raises CollectiveMismatch, and the others fail with it.
    """

    __slots__ = ("_first", "operations")

    def __init__(self, operations: int) -> None:
        self.operations = operations
        self._first: _core.Work | None = None

    def place(self) -> tuple[int, _core.Work | None]:
        """The number of operations and the first one, which the core gets with the next operation."""
        return self.operations, self._first

    def started(self, native: _core.Work) -> None:
        """Note a started operation of this call."""
        if self._first is None:
            self._first = native


class Work:
    """One operation under way. Horovod calls it a handle."""

    __slots__ = ("_keep", "_native", "_stream", "waited")

    def __init__(self, native: _core.Work, keep: Any, stream: int | None = None) -> None:
        self._native = native
        self._keep = keep  # the memory that the operation reads and writes
        self.waited = False  # whether `wait` has ended, in host memory only; faster to ask than `done`
        self._stream = stream  # the tensors' stream; None in host memory

    def wait(self, timeout: float | None = None, stream: int | None = None) -> None:
        """Return when the operation has completed, or raise its error.

        With tensors on a device it returns when the operation is launched: later work on ``stream`` (by default the
        tensors' stream) waits for it, the host does not. Interruptible; releases the GIL. Raises CollectiveTimeout
        after ``timeout`` seconds, which aborts the generation: a timed-out operation cannot be taken back.
        """
        if self._stream is None:
            try:
                self._native.wait(timeout or 0.0)
            finally:
                self._keep = None  # nobody touches the memory any more
                self.waited = True
            return
        try:
            self._native.order(self._stream if stream is None else stream, timeout or 0.0)
        finally:
            self.keep_forever()

    def wait_done(self) -> None:
        """Return when the results are there, also on a device, or raise the operation's error."""
        try:
            self._native.wait(0.0)
        finally:
            self.keep_forever()

    def launched(self) -> bool:
        """Whether `wait` would return at once."""
        return self.done() if self._stream is None else self._native.launched()

    def done(self) -> bool:
        """Whether the results are there, also on a device, or the operation has failed."""
        return self._native.done()

    def ended(self) -> bool:
        """As `done`, but does not ask the device, which is slow: the thread that carries out operations asks it."""
        return self.done() if self._stream is None else self._native.ended()

    def keep_forever(self) -> None:
        """If the operation has failed and left a kernel that may touch its memory, never free that memory."""
        if self._stream is not None and self._keep is not None and self._native.must_keep():
            _never_freed.append(self._keep)
            self._keep = None

    def output(self) -> memoryview:
        """The bytes that an allgather or alltoall produced; they stay valid as long as the view lives."""
        return memoryview(self._native.output())

    def device_output(self) -> _core.DeviceOutput:
        """As `output`, of tensors on a device, once launched: device memory that is freed with the object.

        It is freed on the tensors' stream: another stream must have read it by then.
        """
        return self._native.device_output()

    def counts(self) -> list[int]:
        """Elements that came from each rank, in group order (allgather, alltoall)."""
        return self._native.counts()

    def placed(self) -> bool:
        """Whether the given outputs hold the whole result (allgather, alltoall); else `output` does."""
        return self._native.placed()

    def last_rank(self) -> int:
        """The group rank that joined last (join)."""
        return self._native.last_joined()


HeldWork: TypeAlias = "Work | _core.TensorWork"


class HeldWorks:
    """Keeps handles of operations under way, because their memory must outlive a dropped handle."""

    __slots__ = ("most", "works")

    def __init__(self) -> None:
        self.works: list[HeldWork] = []
        self.most = _FEW
        """Length of `works` beyond which `Communicator.start_tensors`, whose works leave it in `wait`, prunes."""

    def hold(self, work: HeldWork) -> None:
        """Keep the memory of ``work`` until it is done."""
        self.prune()
        self.works.append(work)

    def prune(self) -> None:
        """Drop operations that are done, even if nobody has waited for them."""
        for held in self.works:
            held.keep_forever()
        self.works[:] = [held for held in self.works if not held.waited and not held.ended()]
        self.most = max(_FEW, 2 * len(self.works))

    def end(self, native: _core.Communicator, why: str) -> None:
        """Return when nothing touches the memory. Aborts the generation of ``native`` if one is not launched yet."""
        pending = [work for work in self.works if not work.done()]
        if any(not work.launched() for work in pending):
            native.abort(f"{why} with operations under way")
        for work in pending:
            with suppress(CollectiveError):
                work.wait_done()
        self.clear()

    def clear(self) -> None:
        """Drop all operations; none is under way."""
        for work in self.works:
            work.keep_forever()
        self.works.clear()
