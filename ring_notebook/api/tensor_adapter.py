"""What the shared floor needs of a framework's tensors, and the adapters of the frameworks that a rank has loaded."""

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
        """Whether ``value`` is a tensor that its dtype, its shape and its bytes describe completely."""

    def buffer_of(self, tensor: Any) -> Buffer:
        """Buffer over the memory of ``tensor``, or over a contiguous copy in host memory where it has none."""

    def empty(self, dtype: DType, shape: Sequence[int]) -> Any:
        """A new tensor in host memory whose values are still to be written; `buffer_of` it makes no copy."""


_adapters: dict[str, TensorAdapter] = {}


def register_adapter(adapter: TensorAdapter) -> None:
    """Make the tensors of a framework known; a later adapter of the same name takes the place of an earlier one."""
    _adapters[adapter.name] = adapter


def adapters() -> tuple[TensorAdapter, ...]:
    """The adapters of the frameworks that this rank has loaded."""
    return tuple(_adapters.values())


def adapter_of(name: str) -> TensorAdapter:
    """The adapter of the framework called ``name``, whose face is imported where that has not been done yet.

    Raises RingError when no framework of that name is installed here.
    """
    if name not in _adapters:
        import_module(framework(name).face)
    return _adapters[name]
