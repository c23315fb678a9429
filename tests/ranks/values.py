"""Values that differ by rank and are exact in every dtype."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.randn` with a generator of the CPU, for a default device that does not take one."""
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(torch.get_default_device())


def data(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    """Small whole numbers that differ by rank: exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(1, 5, shape, generator=generator, device="cpu")
    return values.to(dtype).to(torch.get_default_device())


def all_data(hvd: ModuleType, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> Tensor:
    """The data of all ranks, stacked, in float64."""
    return torch.stack([data(rank, dtype, shape).double() for rank in range(hvd.size())])
