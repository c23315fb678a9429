"""Numbers as bytes: what rounding may take away, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ring_notebook.core.native import core
from ring_notebook.torch import Compression
from ring_notebook.torch.compression import Int8Compression

int8 = Int8Compression()
BLOCK = 1024
COUNTS = (1, 2, 7, 8, 31, 32, 33, 255, 1023, 1024, 1025, 2047, 2048, 5000)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has."""
    if core.select_isa(request.param) != request.param:
        core.select_isa("")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    core.select_isa("")


def packed(values: Tensor, before: Tensor | None = None, left: Tensor | None = None) -> Tensor:
    """The bytes, at an odd address, within others that must not change."""
    size = int8.size(values.numel())
    room = torch.full((size + 2,), 77, dtype=torch.uint8)
    int8.pack(values, room[1:-1], before, left)
    assert (int(room[0]), int(room[-1])) == (77, 77)
    return room[1:-1]


def unpacked(data: Tensor, count: int) -> Tensor:
    room = torch.full((count + 2,), 77.0)
    int8.unpack(data, room[1:-1])
    assert (float(room[0]), float(room[-1])) == (77, 77)
    return room[1:-1]


def reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales, as torch computes them."""
    blocks = torch.split(values, BLOCK)
    scales = [(one.abs().amax() / 127).clamp_min(torch.finfo(torch.float32).tiny) for one in blocks]
    rounded = [(one / scale).round().to(torch.int8) for one, scale in zip(blocks, scales, strict=True)]
    return torch.cat(rounded), torch.stack(scales)


@pytest.mark.parametrize("count", COUNTS)
def test_is_what_torch_computes_to_the_bit(isa: str, count: int) -> None:
    values = torch.randn(count + 1, generator=torch.Generator().manual_seed(count))[1:]
    data = packed(values)
    assert data.numel() == count + 4 * -(-count // BLOCK)
    rounded, scales = reference(values)
    assert torch.equal(data[:count].view(torch.int8), rounded)
    assert torch.equal(data[count:].clone().view(torch.float32), scales)
    assert torch.equal(unpacked(data, count), rounded * scales.repeat_interleave(BLOCK)[:count])


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-6, 1.0, 1e30, 1e38])
def test_rounds_by_at_most_half_a_scale(isa: str, scale: float) -> None:
    """Also numbers so small that a scale would have no precision, and so large that 127 scales could be infinite."""
    values = (torch.rand(4 * BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1) * scale
    if scale == 1e38:
        values[:2] = torch.tensor([1, -1]) * torch.finfo(torch.float32).max
    left = torch.empty_like(values)
    data = packed(values, left=left)
    got = unpacked(data, values.numel())
    assert got.isfinite().all()
    scales = data[values.numel() :].clone().view(torch.float32).repeat_interleave(BLOCK)
    error = (got.double() - values.double()).abs()
    assert (error <= scales.double() * 0.5001).all()
    torch.testing.assert_close(left, values - got, rtol=0, atol=float(scales.max()) * 1e-5)


def test_halves_go_to_even(isa: str) -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.4999, -126.5])
    assert packed(values)[:9].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 3, -126]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 3, BLOCK - 1, 2 * BLOCK + 5])
def test_what_is_not_finite_comes_back_as_nan_and_leaves_what_was_left(isa: str, wrong: float, at: int) -> None:
    count = 2 * BLOCK + 6
    values, before, left = torch.ones(count), torch.full((count,), 0.25), torch.empty(count)
    values[at] = wrong
    got = unpacked(packed(values, before, left), count)
    begin = at // BLOCK * BLOCK
    own = torch.zeros(count, dtype=torch.bool)
    own[begin : begin + BLOCK] = True
    assert got[own].isnan().all()
    torch.testing.assert_close(got[~own], torch.full_like(got[~own], 1.25))
    assert torch.equal(left[own], before[own])
    assert left.isfinite().all()
    packed(values, None, left)
    assert not left[own].any()


def test_zeros_stay_zeros(isa: str) -> None:
    left = torch.ones(BLOCK + 3)
    data = packed(torch.zeros(BLOCK + 3), left=left)
    assert not unpacked(data, BLOCK + 3).any()
    assert not left.any()


def test_what_is_left_adds_up_to_the_truth(isa: str) -> None:
    """In place too; without it the errors of a constant would add up."""
    values = torch.linspace(-1, 1, 1500)
    left, total = torch.zeros(1500), torch.zeros(1500)
    for _ in range(50):
        int8.unpack(packed(values, left, left), total, adds=True)
    torch.testing.assert_close(total + left, 50 * values, rtol=1e-5, atol=1e-5)
    assert left.abs().max() <= 1.01 / 254


def test_a_rank_of_nothing() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        Compression.powersgd(0)
