"""Compression of tensors for an allreduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_notebook.api.compressors import CastCompression, Compressor, NoCompression

__all__ = ["Compression", "Compressor"]


def _float_size(tensor: Tensor) -> int:
    return tensor.dtype.itemsize if tensor.dtype.is_floating_point else 0


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor.to(dtype)


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16``."""

    none: Compressor = NoCompression()
    fp16: Compressor = CastCompression("fp16", torch.float16, _float_size, _cast)
    bf16: Compressor = CastCompression("bf16", torch.bfloat16, _float_size, _cast)
