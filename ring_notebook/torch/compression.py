"""Compression of tensors for an allreduce."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """The interface of ``compression`` arguments; users may pass a class of their own."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to reduce, and a context for `decompress`."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""


class _None:
    """Sends tensors unchanged."""

    def __repr__(self) -> str:
        return "Compression.none"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast:
    """Sends floating point tensors in a narrower type; others unchanged."""

    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"Compression.{type(self).__name__.strip('_').lower()}"

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls.dtype.itemsize:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _FP16(_Cast):
    """Sends floating point tensors as float16."""

    dtype = torch.float16


class _BF16(_Cast):
    """Sends floating point tensors as bfloat16."""

    dtype = torch.bfloat16


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and, beyond Horovod, ``bf16``."""

    none: Compressor = _None()
    fp16: Compressor = _FP16()
    bf16: Compressor = _BF16()
