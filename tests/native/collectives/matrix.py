"""Which element types and sizes a test tries with ranks as threads, as processes and on pretended hosts.

Threads try every type at three ranks, and one type of each kernel at two and seven. Processes and hosts move the same
bytes by other ways, which look at a type's size and kernel alone: they try one type of each kernel at three ranks. All
try one type at every size.
"""

from __future__ import annotations

import pytest

from native.ranks import LAUNCHERS
from ring_notebook.core.buffers import DType

__all__ = ["SIZES", "every_type_and_size"]

SIZES = (1, 2, 3, 4, 7)
KERNELS = (DType.INT32, DType.BFLOAT16, DType.FLOAT32, DType.BOOL)
"""Integers that wrap, halves summed in float32, plain arithmetic, and logic; of 4, 2, 4 and 1 bytes."""


def _is_tried(launcher: str, size: int, dtype: DType) -> bool:
    if dtype is DType.FLOAT32 or (dtype in KERNELS and size == 3):
        return True
    return launcher == "threads" and (size == 3 or (dtype in KERNELS and size in (2, 7)))


every_type_and_size = pytest.mark.parametrize(
    ("launcher", "size", "dtype"),
    [
        pytest.param(launcher, size, dtype, id=f"{launcher}-{size}-{dtype.name.lower()}")
        for launcher in LAUNCHERS
        for size in SIZES
        for dtype in DType
        if _is_tried(launcher, size, dtype)
    ],
)
