"""Small tensors of a device packed into one before they are reduced: each would cost a transfer of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_notebook.torch.devices import kind_of
from ring_notebook.torch.tensors import copy_each

SMALL = 1 << 20
"""Bytes below which a tensor is packed. Copies this size take a GPU microseconds; not yet measured on one."""


class Packer:
    """Packs and unpacks the tensors of one bucket, which have one dtype, through memory that stays.

    Tensors in CPU memory are left alone: the core reduces many small ones as fast as one.
    """

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._parts: list[Tensor] = []
        self._packed: list[Tensor] = []

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What to reduce in place of ``tensors``: the large ones, and one that holds the others."""
        small = [tensor for tensor in tensors if _is_small(tensor)]
        if len(small) < 2:
            return list(tensors)
        flat = self._lay_out(small)
        copy_each(self._parts, small)
        self._packed = small
        return [*(tensor for tensor in tensors if not _is_small(tensor)), flat]

    def unpack(self) -> None:
        """Bring what was reduced back into the tensors that `pack` was given."""
        if self._packed:
            copy_each(self._packed, self._parts)
        self._packed = []

    def _lay_out(self, small: Sequence[Tensor]) -> Tensor:
        shapes = [tensor.shape for tensor in small]
        first = small[0]
        flat = self._flat
        if (
            flat is None
            or [part.shape for part in self._parts] != shapes
            or (flat.dtype, flat.device) != (first.dtype, first.device)
        ):
            flat = self._flat = first.new_empty(sum(tensor.numel() for tensor in small))
            pieces = torch.split(flat, [tensor.numel() for tensor in small])
            self._parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return flat


def _is_small(tensor: Tensor) -> bool:
    return not tensor.is_cpu and tensor.numel() * tensor.element_size() < SMALL and kind_of(tensor) is not None
