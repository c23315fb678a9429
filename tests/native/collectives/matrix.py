"""Which element types and sizes a test tries with ranks as threads, as processes and on pretended hosts.

Threads try every type at three ranks, and one type of each kernel at two and seven. Processes and hosts move the same
bytes by other ways, which look at a type's size and kernel alone: they try one type of each kernel at three ranks. All
try one type at every size. Slow tests try every pair of launcher, size and type once.
"""

from __future__ import annotations

import pytest

from native.ranks import LAUNCHERS
from ring_notebook.core.buffers import DType

__all__ = ["SIZES", "every_type_and_size"]

SIZES = (1, 2, 3, 4, 7)
KERNELS = (DType.INT32, DType.BFLOAT16, DType.FLOAT32, DType.BOOL)
"""Integers that wrap, halves summed in float32, plain arithmetic, and logic; of 4, 2, 4 and 1 bytes."""


def _is_slow(launcher: str, size: int, dtype: DType) -> bool:
    if launcher == "threads":
        return dtype is not DType.FLOAT32 and size != 3 and not (dtype in KERNELS and size in (2, 7))
    return dtype is not DType.FLOAT32 and not (dtype in KERNELS and size == 3)


def _paired(size_at: int, type_at: int) -> str:
    """The launcher of a size and a type in slow tests: each launcher has each size and each type."""
    return list(LAUNCHERS)[(size_at + type_at) % len(LAUNCHERS)]


every_type_and_size = pytest.mark.parametrize(
    ("launcher", "size", "dtype"),
    [
        pytest.param(
            *(launcher, size, dtype),
            id=f"{launcher}-{size}-{dtype.name.lower()}",
            marks=[pytest.mark.slow] * _is_slow(launcher, size, dtype),
        )
        for launcher in LAUNCHERS
        for size_at, size in enumerate(SIZES)
        for type_at, dtype in enumerate(DType)
        if launcher == _paired(size_at, type_at) or not _is_slow(launcher, size, dtype)
    ],
)
