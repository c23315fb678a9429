"""Tests of tensors on a device, in launches of their own: this machine's GPUs, else a pretended one over fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness.cuda_stand_in import CudaStandIn
from harness.pretended_gpu import NAME, PretendedGpu, PretendedKind, pretend
from native.fakes.device import CUDA, environment
from ring_notebook.config import config
from ring_notebook.gpus import gpus
from ring_notebook.torch.devices import register_device


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[torch.device]:
    """The device of this rank."""
    if gpus():
        yield torch.device("cuda", rank % torch.cuda.device_count())
        return
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    config.cache_clear()
    module = pretend(lambda: CudaStandIn(CUDA()))
    register_device(NAME, PretendedKind())
    module.waits.clear()
    yield torch.device(NAME, 0)
    config.cache_clear()


@pytest.fixture
def gpu(device: torch.device) -> PretendedGpu:
    """The pretended device, whose `waits` lists when the host has waited for it."""
    if device.type != NAME:
        pytest.skip("a GPU can be neither held nor asked when the host has waited for it")
    module: PretendedGpu = getattr(torch, NAME)
    return module
