"""Tests of tensors on a device, which is pretended; their launches are their own."""

from __future__ import annotations

import pytest
import torch

from harness.late_copies import LateCopies
from harness.pretended_gpu import NAME, PretendedGpu, pretend
from ring_notebook.torch.devices import register_device


@pytest.fixture
def gpu() -> PretendedGpu:
    """The pretended device, whose `waits` lists when the host has waited for it."""
    module = pretend(LateCopies)
    register_device(NAME)
    module.waits.clear()
    return module


@pytest.fixture(autouse=True)
def device(gpu: PretendedGpu) -> torch.device:
    """The device of this rank."""
    return torch.device(NAME, 0)
