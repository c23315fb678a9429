"""Tensors and arrays as Buffers: the only place that makes pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from ring_notebook.core.native import core

DType: TypeAlias = core.DType
Device: TypeAlias = core.Device
_NUMBERED = tuple(DType)


# Not frozen: that would double the time to make one, and every collective makes one.
@dataclass(slots=True)
class Buffer:
    """A contiguous piece of memory that a collective reads or writes.

    ``address`` is the first byte, ``shape`` counts elements of ``dtype``. ``owner`` keeps the memory alive while an
    operation may touch it. ``device`` and ``dtype`` decide the transport: ranks compare theirs, and the core raises
    ValueError where no transport moves such tensors. ``index`` is the number of the device; ``stream`` is the handle of
    the stream on which the tensor was written and will be read (0: the default stream).
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    owner: Any = None
    device: Device = Device.CPU
    index: int = 0
    stream: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


def from_memoryview(data: Any) -> Buffer:
    """A Buffer over an object with the buffer protocol (numpy array, array, bytearray, ring memory).

    Raises TypeError when the memory is not C-contiguous, is read-only, or has an element type the core lacks.
    """
    address, shape, dtype, fmt, readonly = core.buffer_info(data)
    if dtype is None:
        known = ", ".join(one.name.lower() for one in DType)
        raise TypeError(f"elements of format {fmt!r} cannot be reduced; convert them to one of {known}")
    if readonly:
        raise TypeError("a collective needs writable memory; pass a copy")
    return Buffer(address, shape, _NUMBERED[dtype], owner=data)


def copy_bytes(source: memoryview, target: Buffer) -> None:
    """Copy ``source``, which is contiguous, to ``target``, which has as many bytes."""
    if target.nbytes:
        ctypes.memmove(target.address, core.buffer_info(source)[0], target.nbytes)


def integers_of(buffer: Buffer) -> list[int]:
    """The elements of a buffer of int32 or int64. Raises TypeError for others."""
    kinds: dict[DType, Any] = {DType.INT32: ctypes.c_int32, DType.INT64: ctypes.c_int64}
    if buffer.dtype not in kinds:
        raise TypeError(f"expected int32 or int64, got {buffer.dtype.name.lower()}")
    return list((kinds[buffer.dtype] * buffer.count).from_address(buffer.address)) if buffer.count else []


def targets_of(outputs: Sequence[Buffer]) -> list[tuple[int, int]]:
    """The address and the number of elements of each output."""
    return [(output.address, output.count) for output in outputs]


def device_of(first: Buffer, *others: Buffer) -> tuple[Device, int, int]:
    """The kind of device, its index and the stream of all buffers. Raises ValueError when they differ."""
    for other in others:
        if other.device is not first.device or other.index != first.index:
            raise ValueError(
                f"an operation takes tensors on one device, got {_place(first)} and {_place(other)}; "
                "move them to one device"
            )
        if other.stream != first.stream:
            raise ValueError("the tensors of one operation must have been written on one stream")
    return first.device, first.index, first.stream


def _place(buffer: Buffer) -> str:
    name = buffer.device.name.lower()
    return name if buffer.device is Device.CPU else f"{name}:{buffer.index}"
