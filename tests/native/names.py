"""Sums that are started by name, for tests of how they match and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.work import Work

__all__ = ["LATE", "ends", "start", "total", "waits_for"]

LATE = 30.0
"""Seconds within which a rank must have learned that it waits in vain: a limit for failure, far above what it takes."""


def start(ring: Communicator, name: str, value: float, count: int = 3) -> tuple[Tensor, Work]:
    """One sum of ``value``."""
    tensor = Tensor.of(ring, np.full(count, value), DType.FLOAT32)
    return tensor, ring.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=False)


def total(ring: Communicator, *, count: int = 3) -> None:
    """One blocking sum without a name that must be right, of ranks that each hold their global rank."""
    tensor = Tensor.of(ring, np.full(count, float(ring.ranks[ring.rank])), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer])
    assert tensor.values.tolist() == [float(sum(ring.ranks))] * count


def waits_for(ring: Communicator, name: str) -> bool:
    """Whether this rank waits in ``ring`` for ranks that have not started ``name``."""
    own = next(entry for entry in ring.snapshot() if entry["rank"] == ring.ranks[ring.rank])
    return bool(own["name"] == name and own["missing"])


def ends(wait: Callable[[], object], error: type[BaseException], match: str | None) -> None:
    """``wait`` must raise ``error`` soon."""
    begun = time.monotonic()
    with pytest.raises(error, match=match):
        wait()
    assert time.monotonic() - begun < LATE
