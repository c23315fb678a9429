"""Tests of tensors on a device, in launches of their own: this machine's GPUs, else a pretended one over fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness.devices.cuda_stand_in import CudaStandIn
from harness.devices.pretended_gpu import NAME, PretendedGpu, PretendedKind, pretend
from native.fakes.device import CUDA, environment
from ring_notebook.config import config
from ring_notebook.machine.gpus import gpus, sharing
from ring_notebook.torch.devices import register_device


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a folder of tests that runs here again, all but what its module names are slow."""
    module = getattr(item, "module", None)
    usual = getattr(module, "USUAL", None)
    if usual is not None and getattr(item, "originalname", "") not in usual:
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> Iterator[torch.device]:
    """The device of this rank. Ranks that share a GPU reduce through host memory, unless NCCL may connect them."""
    if names := gpus():
        if sharing(size, names):
            monkeypatch.setenv("RING_DEVICE", "host")
            config.cache_clear()
        yield torch.device("cuda", rank % torch.cuda.device_count())
        config.cache_clear()
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
def default_device(device: torch.device, request: pytest.FixtureRequest) -> Iterator[None]:
    """Has torch make tensors on the device, for tests of another folder that run here again."""
    left_out: dict[str, str] = request.module.NOT_HERE | (request.module.NOT_PRETENDED if device.type == NAME else {})
    if why := left_out.get(request.node.name) or left_out.get(request.function.__name__):
        pytest.skip(why)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture
def gpu(device: torch.device) -> PretendedGpu:
    """The pretended device, whose `waits` lists when the host has waited for it."""
    if device.type != NAME:
        pytest.skip("a GPU can be neither held nor asked when the host has waited for it")
    module: PretendedGpu = getattr(torch, NAME)
    return module
