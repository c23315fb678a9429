"""Test data of every element type, and what a collective should make of it, computed in float64 or exact integers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ring_notebook.core.buffers import Buffer, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.work import Work

__all__ = ["Tensor", "decode", "encode", "expected", "forget_samples", "produced", "reduced_samples", "sample"]

Array = npt.NDArray[Any]
INTEGERS = {dtype for dtype in DType if "INT" in dtype.name}
UNSIGNED = {dtype for dtype in DType if "UINT" in dtype.name}
# numpy has no bfloat16: its bits.
_STORAGE = {dtype: np.dtype("uint16" if dtype is DType.BFLOAT16 else dtype.name.lower()) for dtype in DType}
_REDUCTIONS: dict[ReduceOp, Callable[..., Array]] = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.AVERAGE), np.sum),
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.PRODUCT: np.prod,
}


def encode(values: Array, dtype: DType) -> Array:
    """``values`` as elements of ``dtype``, rounded to nearest even."""
    if dtype is DType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(_STORAGE[dtype])


def decode(storage: Array, dtype: DType) -> Array:
    """The values of ``storage``: float64, exact integers or bool."""
    if dtype is DType.BFLOAT16:
        return (storage.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return storage.astype(np.int64 if dtype in INTEGERS else bool if dtype is DType.BOOL else np.float64)


# Cached, because all ranks want the same ones: a test asks for them once before its ranks do.
@lru_cache(maxsize=100)
def sample(dtype: DType, rank: int, count: int, op: ReduceOp = ReduceOp.SUM) -> Array:
    """``count`` values of one rank whose reduction over a few ranks is exact in every type but the narrow integers."""
    index = np.arange(count, dtype=np.int64)
    if dtype is DType.BOOL:
        return (index * (rank + 3)) % 5 < 2
    if op is ReduceOp.PRODUCT:
        values = np.array([1, -1, 2, 1, 1])[(index + rank) % 5]
    else:
        values = (index * 7 + rank * 5) % 13 - (0 if dtype in UNSIGNED else 6)
    values = np.abs(values) if dtype in UNSIGNED else values
    return values if dtype in INTEGERS else values.astype(np.float64)


@lru_cache(maxsize=100)
def reduced_samples(dtype: DType, size: int, count: int, op: ReduceOp, prescale: float, postscale: float) -> Array:
    """What an allreduce of `sample` over ``size`` ranks gives."""
    return expected([sample(dtype, rank, count, op) for rank in range(size)], dtype, op, prescale, postscale)


def forget_samples() -> None:
    """Free what `sample` and `reduced_samples` have kept."""
    sample.cache_clear()
    reduced_samples.cache_clear()


def expected(
    inputs: Sequence[Array], dtype: DType, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
) -> Array:
    """The reduction of ``inputs``, one per rank. Integers are truncated after each scaling, as Horovod does."""
    if dtype is DType.BOOL:
        every = op in (ReduceOp.MIN, ReduceOp.PRODUCT)
        return np.asarray(np.all(np.stack(inputs), axis=0) if every else np.any(np.stack(inputs), axis=0))
    whole = dtype in INTEGERS
    scaled = [values * prescale for values in inputs]
    if whole:
        scaled = [np.trunc(values).astype(np.int64) for values in scaled]
    result = np.asarray(_REDUCTIONS[op](np.stack(scaled), axis=0))
    if whole:
        result = result.astype(_STORAGE[dtype]).astype(np.int64)  # wraps around
    if op is ReduceOp.AVERAGE:
        result = np.trunc(result / len(inputs)) if whole else result / len(inputs)
    result = result * postscale
    return np.asarray(np.trunc(result).astype(np.int64) if whole else result)


def produced(work: Work) -> bytes | memoryview:
    """What an allgather or alltoall has given, wherever it lies."""
    if Tensor.on_device is None:
        return work.output()
    work.wait_done()
    output = work.device_output()
    return ctypes.string_at(output.address, output.nbytes)


@dataclass
class Tensor:
    """Memory of a rank for a collective, ordinary or in ring memory."""

    array: Array
    buffer: Buffer
    arrive: Callable[[], None] | None = None
    """Returns when what has been launched for it is done; None where nothing is launched."""

    on_device: ClassVar[Callable[[Communicator, Array, DType], Tensor] | None] = None
    """Makes the tensors of tests that run on devices too; None where they lie in host memory."""

    @classmethod
    def of(cls, communicator: Communicator, values: Array, dtype: DType, *, ring: bool = False) -> Tensor:
        """A tensor that holds ``values``; on a device there is no ring memory."""
        if cls.on_device is not None:
            return cls.on_device(communicator, values, dtype)
        storage = np.ascontiguousarray(encode(values, dtype)).reshape(values.shape)
        if ring:
            placed = np.ndarray(storage.shape, storage.dtype, buffer=communicator.empty(storage.nbytes))
            placed[...] = storage
            storage = placed
        return cls(storage, Buffer(storage.ctypes.data, storage.shape, dtype, owner=storage))

    @property
    def values(self) -> Array:
        """What the tensor holds now, or when what has been launched is done."""
        if self.arrive is not None:
            self.arrive()
        return decode(self.array, self.buffer.dtype)
