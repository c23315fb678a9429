"""Compression of tensors for an allreduce, and of the differences of local steps."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ring_notebook.api.compressors import CastCompression, Compressor, NoCompression

__all__ = ["Compression", "Compressor", "Int8Compression"]


def _float_size(tensor: Tensor) -> int:
    return tensor.dtype.itemsize if tensor.dtype.is_floating_point else 0


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor.to(dtype)


class Int8Compression:
    """A byte for each element, and a float32 scale for each `BLOCK` of them: a quarter of the bytes of float32.

    Sums of bytes overflow, so no allreduce can add them: only the differences of local steps are sent so, each rank
    adding up what it gets and keeping what rounding has taken from it (error feedback, Seide et al. 2014).
    """

    BLOCK = 1024
    """Elements that share a scale, the greatest of them divided by 127."""

    def __repr__(self) -> str:
        return "Compression.int8"

    def compress(self, tensor: Any) -> NoReturn:
        """Raises TypeError, always."""
        raise TypeError(
            "Compression.int8 is for the differences of local steps, prepare(..., sync_every=50); gradients and other "
            "tensors take Compression.fp16 or .bf16"
        )

    def decompress(self, tensor: Any, ctx: Any) -> NoReturn:
        """Raises TypeError, as `compress`."""
        self.compress(tensor)

    def sizes(self, elements: int) -> tuple[int, int]:
        """``elements`` filled up to whole blocks, and the bytes that `pack` makes of them."""
        blocks = -(-elements // self.BLOCK)
        return blocks * self.BLOCK, blocks * (self.BLOCK + 4)

    def pack(self, values: Tensor) -> Tensor:
        """Bytes of a float32 vector of whole blocks: its elements, rounded, then the scales.

        Rounding changes no element by more than half of its scale. A block with NaN or infinity becomes NaN.
        """
        blocks = values.view(-1, self.BLOCK)
        scales = blocks.abs().amax(1) / 127
        rounded = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
        return torch.cat([rounded.view(-1).view(torch.uint8), scales.view(torch.uint8)])

    def unpack(self, data: Tensor) -> Tensor:
        """The float32 vector of such bytes."""
        blocks = data.numel() // (self.BLOCK + 4)
        scales = data[blocks * self.BLOCK :].clone().view(torch.float32)
        return (data[: blocks * self.BLOCK].view(torch.int8).view(blocks, self.BLOCK) * scales[:, None]).view(-1)


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16`` and ``int8``.

    ``int8`` is for the differences of local steps alone, see `LocalSteps`.
    """

    none: Compressor = NoCompression()
    fp16: Compressor = CastCompression("fp16", torch.float16, _float_size, _cast)
    bf16: Compressor = CastCompression("bf16", torch.bfloat16, _float_size, _cast)
    int8: Compressor = Int8Compression()
