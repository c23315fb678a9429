"""One call of each collective, for tests that end it in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.work import Work

__all__ = ["ASYNCHRONOUS", "CALLS", "WAITS", "Guard"]

Call = Callable[[Communicator, bool], Work]


@dataclass
class Guard:
    """Notes whether a commit has succeeded, and the newest change that all ranks have."""

    held: bool = False
    agreed: int = -1


def _ones(ring: Communicator, count: int, *, place: bool = False) -> Tensor:
    return Tensor.of(ring, np.ones(count), DType.FLOAT32, ring=place)


def _allreduce(count: int, *, place: bool = False, tensors: int = 1) -> Call:
    def call(ring: Communicator, blocking: bool) -> Work:
        own = [_ones(ring, count, place=place).buffer for _ in range(tensors)]
        return ring.allreduce(own, own, blocking=blocking)

    return call


def _reducescatter(ring: Communicator, blocking: bool) -> Work:
    rows = 50_000 * ring.size
    return ring.reducescatter(_ones(ring, rows).buffer, _ones(ring, 50_000).buffer, blocking=blocking)


def _allgather(ring: Communicator, blocking: bool) -> Work:
    return ring.allgather(_ones(ring, 50_000 * (ring.rank + 1)).buffer, blocking=blocking)


def _broadcast(ring: Communicator, blocking: bool) -> Work:
    own = _ones(ring, 300_000).buffer
    return ring.broadcast(own, own, 0, blocking=blocking)


def _alltoall(ring: Communicator, blocking: bool) -> Work:
    return ring.alltoall([_ones(ring, 50_000 * ring.size).buffer], [50_000] * ring.size, blocking=blocking)


ASYNCHRONOUS: dict[str, Call] = {
    "allreduce small": _allreduce(3),
    "allreduce in ring memory": _allreduce(2_000_000, place=True),
    "allreduce staged": _allreduce(500_000),
    "allreduce fused": _allreduce(40_000, tensors=5),
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "barrier": lambda ring, blocking: ring.barrier(blocking=blocking),
}
"""By name: starts the operation, or carries it out when blocking."""

CALLS: dict[str, Call] = {**ASYNCHRONOUS, "join": lambda ring, blocking: ring.join()}
"""Those too that only block."""

WAITS = [(name, True) for name in CALLS] + [(name, False) for name in ASYNCHRONOUS]
"""Every call, and whether it blocks."""
