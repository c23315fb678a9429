"""The rows of each rank, and the hash of a layout: pure functions with the same result on every rank."""

from __future__ import annotations

from functools import lru_cache

from ring_notebook.core.native import core


def row_split(rows: int, size: int) -> list[int]:
    """Rows that each rank owns after a reducescatter: the first ``rows % size`` ranks get one more (Horovod)."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


# Cached, because the gradients of a model have the same shapes in every step.
@lru_cache(maxsize=256)
def layout_hash(shapes: tuple[tuple[int, ...], ...]) -> int:
    """A hash of 64 bits, equal on ranks that fuse tensors of the same shapes in the same order."""
    return core.layout_hash(shapes)
