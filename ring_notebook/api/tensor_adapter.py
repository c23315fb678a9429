"""The interface of a framework's tensors for `ring_notebook.api`, and the adapters of the loaded frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from ring_notebook.core.buffers import Buffer, DType
from ring_notebook.frameworks import framework


class TensorAdapter(Protocol):
    """The tensors of one framework. A face registers its adapter when it is imported."""

    name: str
    """The framework's name in `ring_notebook.frameworks`."""

    def can_send(self, value: Any) -> bool:
        """Whether ``value`` is a tensor that is completely described by its dtype, shape and bytes."""

    def buffer_of(self, tensor: Any) -> Buffer:
        """Buffer over the memory of ``tensor``, or over a contiguous copy in host memory where that is not possible."""

    def empty(self, dtype: DType, shape: Sequence[int]) -> Any:
        """A new uninitialized tensor in host memory; `buffer_of` for it makes no copy."""


_adapters: dict[str, TensorAdapter] = {}


def register_adapter(adapter: TensorAdapter) -> None:
    """Register the tensors of a framework; a later adapter of the same name replaces an earlier one."""
    _adapters[adapter.name] = adapter


def adapters() -> tuple[TensorAdapter, ...]:
    """The adapters of the frameworks that this rank has loaded."""
    return tuple(_adapters.values())


def adapter_of(name: str) -> TensorAdapter:
    """The adapter of the framework called ``name``; imports its face if that has not been done.

    Raises RingError when no framework of that name is installed here.
    """
    if name not in _adapters:
        import_module(framework(name).face)
    return _adapters[name]
