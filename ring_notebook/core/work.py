"""Handles of operations under way."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ring_notebook.errors import CollectiveError

if TYPE_CHECKING:
    from ring_notebook import _core


_FEW = 8
_never_freed: list[object] = []
"""Memory that a kernel may still touch which nothing has been able to end."""


class Call:
    """The operations that one call of a user starts, as many on every rank.

    Ranks that start different numbers learn it in the first operation, a mismatch; the others then fail with it.
    """

    __slots__ = ("_first", "operations")

    def __init__(self, operations: int) -> None:
        self.operations = operations
        self._first: _core.Work | None = None

    def place(self) -> tuple[int, _core.Work | None]:
        """What the core needs to know of the group with its next operation."""
        return self.operations, self._first

    def started(self, native: _core.Work) -> None:
        """Note an operation of it, which has been started."""
        if self._first is None:
            self._first = native


class Work:
    """One operation under way. Horovod calls it a handle."""

    __slots__ = ("_keep", "_native", "_stream", "waited")

    def __init__(self, native: _core.Work, keep: Any, stream: int | None = None) -> None:
        self._native = native
        self._keep = keep  # the memory that the operation reads and writes
        self.waited = False  # in host memory, and `wait` has ended: what takes less time to ask than `done`
        self._stream = stream  # that of its tensors; None where they are in host memory

    def wait(self, timeout: float | None = None, stream: int | None = None) -> None:
        """Return when the operation has completed, or raise its error.

        That of tensors on a device has been launched when this returns: what comes next on ``stream`` (that of the
        tensors, or another one given here) waits for it, and the host does not.
        Interruptible; releases the GIL. ``timeout`` is in seconds and raises CollectiveTimeout (which aborts the
        generation: a timed-out operation cannot be taken back).
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
        """Whether an operation on a device is known to have ended, without a look at the device, which is slow.

        The thread that carries out operations looks. The same as `done` for other operations.
        """
        return self.done() if self._stream is None else self._native.ended()

    def keep_forever(self) -> None:
        """Where the operation has failed and left a kernel that may touch its memory, never free that."""
        if self._stream is not None and self._keep is not None and self._native.must_keep():
            _never_freed.append(self._keep)
            self._keep = None

    def output(self) -> memoryview:
        """The bytes that an allgather or alltoall produced; they stay valid as long as the view lives."""
        return memoryview(self._native.output())

    def device_output(self) -> _core.DeviceOutput:
        """The same of tensors on a device, once launched: memory that is freed with the object, in the stream's order.

        It is freed on the stream of the tensors, so another stream that reads it must have done so by then.
        """
        return self._native.device_output()

    def counts(self) -> list[int]:
        """Elements that came from each rank, in group order (allgather, alltoall)."""
        return self._native.counts()

    def placed(self) -> bool:
        """Whether all of it lies in the outputs that were given (allgather, alltoall); else it is in `output`."""
        return self._native.placed()

    def last_rank(self) -> int:
        """The group rank that joined last (join)."""
        return self._native.last_joined()


HeldWork: TypeAlias = "Work | _core.TensorWork"


class HeldWorks:
    """Handles of operations under way: to drop one must not drop the memory under its operation."""

    __slots__ = ("most", "works")

    def __init__(self) -> None:
        self.works: list[HeldWork] = []
        self.most = _FEW
        """So many may be in `works` before who adds one that leaves it by itself, in `wait`, calls `prune`."""

    def hold(self, work: HeldWork) -> None:
        """Keep its memory until it is done, and let go of what is."""
        self.prune()
        self.works.append(work)

    def prune(self) -> None:
        """Let go of what is done, whether anybody has waited for it or not."""
        for held in self.works:
            held.keep_forever()
        self.works[:] = [held for held in self.works if not held.waited and not held.ended()]
        self.most = max(_FEW, 2 * len(self.works))

    def end(self, native: _core.Communicator, why: str) -> None:
        """Return when nothing touches the memory. Aborts the generation of ``native`` over what is not launched."""
        pending = [work for work in self.works if not work.done()]
        if any(not work.launched() for work in pending):
            native.abort(f"{why} with operations under way")
        for work in pending:
            with suppress(CollectiveError):
                work.wait_done()
        self.clear()

    def clear(self) -> None:
        """Let go of all; none of them is under way."""
        for work in self.works:
            work.keep_forever()
        self.works.clear()
