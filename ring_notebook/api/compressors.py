"""Compression of tensors for an allreduce, for any framework: none, or a narrower floating point type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol


class Compressor(Protocol):
    """The interface of ``compression`` arguments; users may pass a class of their own."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce, and a context for `decompress`."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in its original form."""


class NoCompression:
    """Sends tensors unchanged. A singleton, also after copying and unpickling, so that code can compare by ``is``."""

    _one: ClassVar[NoCompression | None] = None

    def __new__(cls) -> NoCompression:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __repr__(self) -> str:
        return "Compression.none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompression:
    """Sends floating point tensors of more than two bytes in ``dtype``, which has two; others unchanged."""

    def __init__(
        self, name: str, dtype: Any, float_size: Callable[[Any], int], cast: Callable[[Any, Any], Any]
    ) -> None:
        """``float_size`` gives the size in bytes of a tensor's elements, 0 unless they are floating point numbers."""
        self._name, self._dtype, self._float_size, self._cast = name, dtype, float_size, cast

    def __repr__(self) -> str:
        return f"Compression.{self._name}"

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        if self._float_size(tensor) > 2:
            return self._cast(tensor, self._dtype), tensor.dtype
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else self._cast(tensor, ctx)
