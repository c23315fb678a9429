"""The pretended device itself: modules, hooks and streams behave as on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from harness.devices.pretended_gpu import PretendedGpu

pytestmark = pytest.mark.sizes(2)  # as most tests of this folder: one launch


def test_a_module_moves_trains_and_calls_hooks_on_another_thread(device: torch.device, gpu: PretendedGpu) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters)
    model.to(device)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    hooked: dict[int, int] = {}
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: hooked.update({id(p): threading.get_ident()}))
    before = [p.detach().cpu() for p in parameters]
    torch.nn.functional.cross_entropy(model(torch.randn(4, 3).to(device)), torch.arange(4).to(device) % 2).backward()
    optimizer.step()
    assert hooked.keys() == {id(p) for p in parameters}
    assert threading.get_ident() not in hooked.values()
    assert all(p.device == device and not torch.equal(p.cpu(), was) for p, was in zip(parameters, before, strict=True))


def test_it_notes_when_the_host_waits(device: torch.device, gpu: PretendedGpu) -> None:
    x = torch.ones(3, device=device)
    y = (x * 2).add_(1)
    copy = y.to("cpu", non_blocking=True)
    event = gpu.Event()
    event.record()
    assert gpu.waits == []
    event.synchronize()
    assert copy.tolist() == [3.0] * 3
    assert y.sum().item() == 9
    assert gpu.waits == ["Event.synchronize", "aten::_local_scalar_dense"]


def test_what_is_not_ordered_behind_a_copy_does_not_see_it(device: torch.device, gpu: PretendedGpu) -> None:
    source, target = torch.ones(1 << 16, device=device), torch.zeros(1 << 16, device=device)
    side, copied = gpu.Stream(), gpu.Event()
    with gpu.stream(side), gpu.held():
        target.copy_(source)
        copied.record()
        assert not copied.query()
        with gpu.stream(gpu.Stream()):
            assert (target + 0).host.sum() == 0
    gpu.current_stream().wait_event(copied)
    assert (target + 0).host.sum() == 1 << 16
