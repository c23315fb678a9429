"""Who owns what in a collective: pure functions that every rank evaluates alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["layout_hash", "row_split"]


def row_split(rows: int, size: int) -> list[int]:
    """Rows that each rank owns after a reducescatter: the first ``rows % size`` ranks get one more (Horovod)."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


def layout_hash(shapes: Iterable[tuple[int, ...]]) -> int:
    """64 bits that tell whether two ranks fuse tensors of the same shapes in the same order."""
    digest = hashlib.blake2b(repr(list(shapes)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
