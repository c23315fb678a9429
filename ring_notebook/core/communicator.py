"""The collectives of one group of ranks, and the handles of operations under way."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from ring_notebook.core.buffers import Buffer

__all__ = ["Communicator", "ReduceOp", "Work"]


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one. The values are Horovod's own for its constants."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Work:
    """One operation under way. Horovod calls it a handle."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation has completed, or raise its error.

        Interruptible; releases the GIL. ``timeout`` is in seconds and raises CollectiveTimeout (which aborts the
        epoch: a timed-out operation cannot be taken back).
        """
        raise NotImplementedError

    def done(self) -> bool:
        """Whether `wait` would return at once (also when the operation failed)."""
        raise NotImplementedError

    def output(self) -> memoryview:
        """The bytes that an allgather or alltoall produced; they stay valid as long as the view lives."""
        raise NotImplementedError

    def counts(self) -> list[int]:
        """Elements that came from each rank, in group order (allgather, alltoall)."""
        raise NotImplementedError

    def last_rank(self) -> int:
        """The group rank that joined last (join)."""
        raise NotImplementedError


class Communicator:
    """The collectives of one group. Operations of one group match by order of issue and are checked by header.

    Every method raises CollectiveMismatch on every rank when the ranks do not call the same thing,
    CollectiveAborted when another rank failed, left or died, CollectiveTimeout past the deadline, and
    KeyboardInterrupt when this process is interrupted while it waits.
    """

    rank: int  # index of this process in the group
    size: int
    ranks: tuple[int, ...]  # global ranks of the members, in group order

    def allreduce(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        blocking: bool = True,
    ) -> Work:
        """Reduce each input over all ranks into the output of the same index (in place when they are the same).

        All tensors of one call share a dtype and travel as one fused operation.
        """
        raise NotImplementedError

    def reducescatter(
        self,
        input: Buffer,
        output: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        blocking: bool = True,
    ) -> Work:
        """Reduce ``input`` and leave the rows of this rank in ``output``: `row_split` gives how many."""
        raise NotImplementedError

    def allgather(self, input: Buffer, *, name: str = "", blocking: bool = True) -> Work:
        """Concatenate the inputs of all ranks along the first dimension (which may differ by rank)."""
        raise NotImplementedError

    def alltoall(self, input: Buffer, splits: Sequence[int], *, name: str = "", blocking: bool = True) -> Work:
        """Send ``splits[r]`` rows to each rank r; ``Work.output()`` holds the received rows in rank order."""
        raise NotImplementedError

    def broadcast(self, input: Buffer, output: Buffer, root: int, *, name: str = "", blocking: bool = True) -> Work:
        """Copy ``input`` of group rank ``root`` into ``output`` on every rank."""
        raise NotImplementedError

    def barrier(self, *, name: str = "", blocking: bool = True) -> Work:
        """Return when all ranks have come here."""
        raise NotImplementedError

    def join(self) -> Work:
        """Contribute zeros to the others' allreduces until all ranks have joined (Horovod: ``join``)."""
        raise NotImplementedError

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator over ``ranks`` (of this group); None on the others. All ranks of this group must call it."""
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """End the epoch: every pending and later operation of every rank raises CollectiveAborted with ``reason``."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group. Waits for nothing but this rank's own operations under way."""
        raise NotImplementedError

    def snapshot(self) -> list[dict[str, Any]]:
        """What every rank of the group is doing now: rank, operation, name, sequence, state, seconds in it."""
        raise NotImplementedError

    def empty(self, nbytes: int) -> Any:
        """``nbytes`` of ring memory as a writable object with the buffer protocol; freed with its last view."""
        raise NotImplementedError


def row_split(rows: int, size: int) -> list[int]:
    """Rows that each rank owns after a reducescatter: the first ``rows % size`` ranks get one more (Horovod)."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]
