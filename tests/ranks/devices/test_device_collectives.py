"""Collectives of a device in order with what its streams do; `test_collectives_again.py` has those of their results."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch

from harness.devices.pretended_gpu import PretendedGpu

pytestmark = pytest.mark.sizes(2, slow=(1, 3))


def test_in_place_and_out_of_place(hvd: ModuleType, size: int, device: torch.device) -> None:
    here = torch.ones(6, device=device)
    assert hvd.allreduce(here, op=hvd.Sum).tolist() == [size] * 6
    assert here.tolist() == [1] * 6
    assert hvd.allreduce_(here, op=hvd.Sum) is here
    assert here.tolist() == [size] * 6


def test_groups_of_several_dtypes_and_of_both_memories(hvd: ModuleType, size: int, device: torch.device) -> None:
    tensors = [
        torch.ones(3, device=device),
        torch.ones(2, dtype=torch.int64, device=device),
        torch.ones(4),
        torch.ones(2, 2, device=device),
    ]
    reduced = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [tensor.device for tensor in reduced] == [tensor.device for tensor in tensors]
    assert [tensor.sum().item() for tensor in reduced] == [3 * size, 2 * size, 4 * size, 4 * size]


def test_a_result_waits_for_what_was_queued_before_it(
    hvd: ModuleType, device: torch.device, size: int, gpu: PretendedGpu
) -> None:
    """The sum is of what the stream will have written, and the stream sees the sum: the host waits for neither."""
    hvd.allreduce(torch.ones(1, device=device))  # connects
    source, x = torch.ones(1 << 14, device=device), torch.zeros(1 << 14, device=device)
    with gpu.held():
        x.copy_(source)
        hvd.allreduce_(x, op=hvd.Sum)
        copy = torch.empty_like(x).copy_(x)
    assert gpu.waits == []
    assert copy.sum().item() == size << 14


def test_synchronize_orders_the_stream_that_asks(
    hvd: ModuleType, device: torch.device, size: int, gpu: PretendedGpu
) -> None:
    hvd.allreduce(torch.ones(1, device=device))
    source, x = torch.ones(1 << 14, device=device), torch.zeros(1 << 14, device=device)
    first, second = gpu.Stream(), gpu.Stream()
    with gpu.held(first):
        with gpu.stream(first):
            x.copy_(source)
            handle = hvd.allreduce_async_(x, op=hvd.Sum, name="x")
        with gpu.stream(second):
            copy = torch.empty_like(x).copy_(hvd.synchronize(handle))
    assert gpu.waits == []
    with gpu.stream(second):
        assert copy.sum().item() == size << 14
    while not hvd.poll(handle):  # the core has yet to see it
        time.sleep(0.001)


@pytest.mark.sizes(2)
def test_it_is_nccl_that_does_it(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    hvd.allreduce(torch.ones(3, device=device))
    assert hvd.global_process_set.communicator.device_transport() == ("nccl", "")


def test_several_handles_are_held_until_they_are_done(hvd: ModuleType, size: int, device: torch.device) -> None:
    handles = [hvd.allreduce_async(torch.ones(1000, device=device) * n, op=hvd.Sum) for n in range(20)]
    assert [hvd.synchronize(handle)[-1].item() for handle in handles] == [size * n for n in range(20)]


def test_a_captured_graph_is_refused(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    x = torch.ones(3, device=device)
    with gpu.capture(), pytest.raises(ValueError, match="CUDA graph"):
        hvd.allreduce_(x)
