"""Compression of tensors for an allreduce, of gradients between hosts, and of the differences of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_integer
from ring_notebook.api.compressors import CastCompression, Compressor, NoCompression
from ring_notebook.core.native import core

__all__ = [
    "AutoCompression",
    "Compression",
    "Compressor",
    "GradientCompression",
    "Int8Compression",
    "PowerSGDCompression",
]


def _float_size(tensor: Tensor) -> int:
    return tensor.dtype.itemsize if tensor.dtype.is_floating_point else 0


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor.to(dtype)


class GradientCompression:
    """Base of compressions that no allreduce can add up, and that keep their error until the next step."""

    def compress(self, tensor: Any) -> NoReturn:
        """Raises TypeError, always."""
        raise TypeError(
            f"{self!r} is for gradients, DistributedOptimizer(..., compression={self!r}); other tensors take "
            "Compression.fp16 or .bf16"
        )

    def decompress(self, tensor: Any, ctx: Any) -> NoReturn:
        """Raises TypeError, as `compress`."""
        self.compress(tensor)


@dataclass(frozen=True, repr=False)
class Int8Compression(GradientCompression):
    """A byte for each element, and a float32 scale for 1024 of them: a quarter of the bytes of float32.

    Sums of bytes overflow, so no allreduce can add them: ranks add received values up in float32. They add the rounding
    error of what they send to the next values that they send (error feedback, Seide et al. 2014).
    """

    def __repr__(self) -> str:
        return "Compression.int8"

    def size(self, elements: int) -> int:
        """The number of bytes that `pack` writes for ``elements``."""
        return core.packed_size(elements)

    def pack(self, values: Tensor, out: Tensor, before: Tensor | None = None, left: Tensor | None = None) -> None:
        """Write the float32 vector ``values`` plus the error ``before`` as bytes to ``out``, the new error to ``left``.

        The error is at most half a scale, which is the greatest of 1024 elements divided by 127. If an element is not
        finite, all of its 1024 become NaN and keep the error ``before``. All tensors are contiguous, in CPU memory.
        """
        core.pack(out.data_ptr(), values.data_ptr(), _address(before), _address(left), values.numel())

    def unpack(self, data: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Write the values of the bytes of `pack` to the float32 vector ``out``, or add them to it."""
        core.unpack(out.data_ptr(), data.data_ptr(), out.numel(), adds)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, repr=False)
class PowerSGDCompression(GradientCompression):
    """Two thin matrices of ``rank`` columns for a matrix of gradients (Vogels et al. 2019), with error feedback."""

    rank: int

    def __repr__(self) -> str:
        return f"Compression.powersgd({self.rank})"


@dataclass(frozen=True, repr=False)
class AutoCompression(GradientCompression):
    """``none``, ``bf16`` or ``int8`` for each bucket, by what the link between hosts can send during backward."""

    def __repr__(self) -> str:
        return "Compression.auto"


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16`` and more.

    ``int8``, ``powersgd(rank)`` and ``auto`` compress gradients of a `DistributedOptimizer` between hosts; on one host
    they change nothing. ``int8`` also compresses the differences of local steps, see `LocalSteps`.
    """

    none: Compressor = NoCompression()
    fp16: Compressor = CastCompression("fp16", torch.float16, _float_size, _cast)
    bf16: Compressor = CastCompression("bf16", torch.bfloat16, _float_size, _cast)
    int8: Compressor = Int8Compression()
    auto: Compressor = AutoCompression()

    @staticmethod
    def powersgd(rank: int = 4) -> Compressor:
        """PowerSGD of that rank, for matrices; other gradients are not compressed. Raises ValueError below 1."""
        if check_integer(rank, "rank") < 1:
            raise ValueError(f"Compression.powersgd: rank must be at least 1, got {rank}")
        return PowerSGDCompression(rank)
