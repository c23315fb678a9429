"""The collectives on tensors of a device: Horovod's results, in order with what the tensors' streams do."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch

from harness.devices.pretended_gpu import PretendedGpu
from ring_notebook.errors import CollectiveMismatch

pytestmark = pytest.mark.sizes(2, slow=(1, 3))

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
HOST_DTYPES = [torch.int16, torch.bool]
OPS = ["Sum", "Average", "Min", "Max", "Product"]


def values(rank: int, dtype: torch.dtype, count: int = 40) -> torch.Tensor:
    """Small integers, which every type holds in any order of adding."""
    return ((torch.arange(count) + rank) % 3 + 1).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, *HOST_DTYPES], ids=str)
def test_reductions(hvd: ModuleType, rank: int, dtype: torch.dtype, device: torch.device) -> None:
    here = values(rank, dtype)
    for name in OPS:
        op = getattr(hvd, name)
        expected = hvd.allreduce(here, op=op)
        reduced = hvd.allreduce(here.to(device), op=op)
        assert reduced.device == device
        assert torch.equal(reduced.cpu(), expected), name
        rows = hvd.reducescatter(here.to(device), op=op)
        assert torch.equal(rows.cpu(), hvd.reducescatter(here, op=op)), name


def test_adasum_goes_through_the_host(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    if size & (size - 1):
        pytest.skip("three ranks are no power of two")
    here = torch.randn(10, generator=torch.Generator().manual_seed(rank))
    assert torch.equal(hvd.allreduce(here.to(device), op=hvd.Adasum).cpu(), hvd.allreduce(here, op=hvd.Adasum))


def test_factors(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    here = torch.ones(5, device=device) * (rank + 1)
    reduced = hvd.allreduce(here, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert reduced.tolist() == [size * (size + 1)] * 5


def test_in_place_and_out_of_place(hvd: ModuleType, size: int, device: torch.device) -> None:
    here = torch.ones(6, device=device)
    assert hvd.allreduce(here, op=hvd.Sum).tolist() == [size] * 6
    assert here.tolist() == [1] * 6
    assert hvd.allreduce_(here, op=hvd.Sum) is here
    assert here.tolist() == [size] * 6


def test_tensors_that_are_not_contiguous(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    matrix = (torch.arange(6).reshape(2, 3) * (rank + 1)).to(device)
    hvd.allreduce_(matrix.t(), op=hvd.Sum)
    assert matrix.tolist() == (torch.arange(6).reshape(2, 3) * (size * (size + 1) // 2)).tolist()


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


def test_movements(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    rows = torch.full((rank + 1, 2), float(rank), dtype=torch.bfloat16, device=device)
    gathered = hvd.allgather(rows)
    assert (gathered.device, gathered.dtype) == (device, torch.bfloat16)
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    root = size - 1
    assert hvd.broadcast(torch.full((3,), rank, device=device), root).tolist() == [root] * 3
    sent = torch.arange(size * (size + 1) // 2).to(device)
    received, splits = hvd.alltoall(sent, splits=list(range(1, size + 1)))
    assert splits.tolist() == [rank + 1] * size
    begin = rank * (rank + 1) // 2
    assert received.tolist() == list(range(begin, begin + rank + 1)) * size


def test_nothing_to_move(hvd: ModuleType, size: int, device: torch.device) -> None:
    assert hvd.allreduce(torch.empty(0, 3, device=device)).shape == (0, 3)
    assert hvd.allgather(torch.empty(2, 0, device=device)).shape == (2 * size, 0)
    assert hvd.allgather(torch.empty(0, 2, device=device)).shape == (0, 2)
    assert hvd.alltoall(torch.empty(size, 0, device=device)).shape == (size, 0)


def test_gradients_flow(hvd: ModuleType, size: int, device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3 * size] * 4


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


def test_names_in_any_order(hvd: ModuleType, rank: int, size: int, device: torch.device) -> None:
    names = [f"t{number}" for number in range(6)]
    handles = {
        name: hvd.allreduce_async(torch.full((3,), float(names.index(name)), device=device), op=hvd.Sum, name=name)
        for name in (names if rank % 2 else reversed(names))
    }
    assert [hvd.synchronize(handles[name])[0].item() for name in names] == [size * number for number in range(6)]


@pytest.mark.sizes(2)
def test_it_is_nccl_that_does_it(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    hvd.allreduce(torch.ones(3, device=device))
    assert hvd.global_process_set.communicator.device_transport() == ("nccl", "")


def test_several_handles_are_held_until_they_are_done(hvd: ModuleType, size: int, device: torch.device) -> None:
    handles = [hvd.allreduce_async(torch.ones(1000, device=device) * n, op=hvd.Sum) for n in range(20)]
    assert [hvd.synchronize(handle)[-1].item() for handle in handles] == [size * n for n in range(20)]


@pytest.mark.sizes(2)
def test_a_tensor_on_the_host_against_one_on_a_device(hvd: ModuleType, rank: int, device: torch.device) -> None:
    with pytest.raises(CollectiveMismatch, match="move the tensors to the same kind of device on every rank"):
        hvd.allreduce(torch.ones(3) if rank else torch.ones(3, device=device))
    assert hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum).tolist() == [2] * 3


@pytest.mark.sizes(2)
def test_ranks_that_have_joined_give_zeros(hvd: ModuleType, rank: int, device: torch.device) -> None:
    hvd.allreduce(torch.ones(1, device=device))  # connects, which a rank that has joined cannot
    if rank == 0:
        assert hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="only here").tolist() == [1] * 3
    assert hvd.join() == 0


@pytest.mark.sizes(2)
def test_a_process_set(hvd: ModuleType, rank: int, device: torch.device) -> None:
    alone = hvd.add_process_set([1])
    if rank == 1:
        assert hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, process_set=alone).tolist() == [1] * 3
    assert hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum).tolist() == [2] * 3


def test_a_captured_graph_is_refused(hvd: ModuleType, device: torch.device, gpu: PretendedGpu) -> None:
    x = torch.ones(3, device=device)
    with gpu.capture(), pytest.raises(ValueError, match="CUDA graph"):
        hvd.allreduce_(x)
