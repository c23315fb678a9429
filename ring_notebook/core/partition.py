"""Which rank owns which part of a tensor: pure functions with the same result on every rank."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ring_notebook.core.native import core

if TYPE_CHECKING:
    from ring_notebook import _core


def row_split(rows: int, size: int) -> list[int]:
    """Rows that each rank owns after a reducescatter: the first ``rows % size`` ranks get one more (Horovod)."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


# Cached, because the gradients of a model have the same shapes in every step.
@lru_cache(maxsize=256)
def layout_hash(shapes: tuple[tuple[int, ...], ...]) -> int:
    """A hash of 64 bits, equal on ranks that fuse tensors of the same shapes in the same order."""
    return core.layout_hash(shapes)


def chunk_range(count: int, size: int, rank: int, itemsize: int) -> tuple[int, int]:
    """The elements [begin, end) of ``count`` that a rank reduces, and updates in a fused step."""
    return core.chunk_range(count, size, rank, itemsize)


def update_options(options: dict[str, Any]) -> tuple[_core.Update, int]:
    """A native Update with these fields, and a hash of 64 bits with which ranks compare theirs."""
    update = core.Update()
    for name, value in options.items():
        setattr(update, name, value)
    digest = hashlib.blake2b(repr(sorted(options.items())).encode(), digest_size=8)
    return update, int.from_bytes(digest.digest(), "little")
