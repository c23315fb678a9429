"""Differences as bytes: what rounding may take away."""

from __future__ import annotations

import pytest
import torch

from ring_notebook.torch import Compression
from ring_notebook.torch.compression import Int8Compression

int8 = Int8Compression()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_rounds_by_at_most_half_a_step(scale: float) -> None:
    values = scale * torch.randn(4 * int8.BLOCK, generator=torch.Generator().manual_seed(0))
    packed = int8.pack(values)
    assert packed.dtype is torch.uint8
    assert packed.numel() == int8.sizes(values.numel())[1] == 4 * (int8.BLOCK + 4)
    steps = values.view(-1, int8.BLOCK).abs().amax(1, keepdim=True) / 127
    error = (int8.unpack(packed).view(-1, int8.BLOCK) - values.view(-1, int8.BLOCK)).abs()
    assert (error <= steps * 0.5001).all()


def test_keeps_zeros_and_shows_nan() -> None:
    assert not int8.unpack(int8.pack(torch.zeros(int8.BLOCK))).any()
    for wrong in (float("nan"), float("inf")):
        values = torch.ones(2 * int8.BLOCK)
        values[3] = wrong
        unpacked = int8.unpack(int8.pack(values))
        assert unpacked[: int8.BLOCK].isnan().any()
        assert torch.allclose(unpacked[int8.BLOCK :], torch.ones(()))


def test_is_for_differences_only() -> None:
    with pytest.raises(TypeError, match="for the differences of local steps"):
        Compression.int8.compress(torch.ones(3))
