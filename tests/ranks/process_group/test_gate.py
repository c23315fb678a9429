"""The gate before operations of Gloo: what it lets through, what it refuses, and what stays usable then."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.process_group import gate

pytestmark = [
    pytest.mark.usefixtures("groups"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.sizes(3, slow=(2, 4)),
]


def operations(group: Any) -> int:
    """How many operations of the core have stood before those of ``group``."""
    made = gate._gates.get(group)
    communicator = made and made.communicator()
    return 0 if communicator is None else int(communicator.counts()["operations"])


def every_collective(group: Any, **options: bool) -> list[Tensor]:
    """The results of every collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root, own = size - 1, torch.arange(4.0) + rank
    summed, sent, wide, part = own.clone(), own.clone(), torch.zeros(4 * size), torch.zeros(4)
    gathered, scattered, exchanged = [torch.zeros(4) for _ in range(size)], torch.zeros(4), torch.zeros(size)
    parts = [own * index for index in range(size)] if rank == root else None
    each = torch.arange(float(size)) + rank
    for call in (
        partial(dist.all_reduce, summed, dist.ReduceOp.MAX),
        partial(dist.broadcast, sent, group_src=root),
        partial(dist.all_gather_into_tensor, wide, own),
        partial(dist.all_gather, gathered, own),
        partial(dist.reduce_scatter_tensor, part, torch.arange(4.0 * size)),
        partial(dist.scatter, scattered, parts, group_src=root),
        partial(dist.all_to_all_single, exchanged, each),
        dist.barrier,
    ):
        work = call(group=group, **options)
        if work is not None:
            work.wait()
            assert work.is_completed()
    return [summed, sent, wide, *gathered, part, scattered, exchanged]


def objects(group: Any) -> list[Any]:
    """A functional collective, and one of objects of different sizes."""
    rank = dist.get_rank(group)
    summed = functional.all_reduce(torch.arange(4.0) + rank, "sum", DeviceMesh.from_group(group, "cpu")) + 0
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, "x" * rank, group=group)
    return [summed.tolist(), everybody]


def test_every_collective_passes_it(groups: tuple[Any, Any]) -> None:
    """With the results that backend "ring" gives, which has no gate besides its own."""
    ring, gloo = groups
    before = operations(gloo)
    for options in ({}, {"async_op": True}):
        torch.testing.assert_close(every_collective(gloo, **options), every_collective(ring, **options))
    assert objects(gloo) == objects(ring)
    assert operations(gloo) - before >= 2 * 8 + 2
    assert ring not in gate._gates


def test_what_nobody_waits_for_starts_meanwhile(groups: tuple[Any, Any], rank: int) -> None:
    """Rank 0 sums, then sends what rank 1 needs before it sums: no rank waits in a call that the other has to make."""
    gloo, value, given = groups[1], torch.ones(2), torch.zeros(1)
    if rank == 1:
        dist.recv(given, 0, group=gloo)
    work = dist.all_reduce(value, group=gloo, async_op=True)
    if rank == 0:
        time.sleep(0.2)
        dist.send(torch.ones(1), 1, group=gloo)
    work.wait()
    assert value.tolist() == [dist.get_world_size()] * 2


def test_groups_in_another_order_that_nobody_waits_for(groups: tuple[Any, Any], rank: int) -> None:
    others = [dist.new_group(backend="gloo") for _ in range(2)]
    values = [torch.ones(2), torch.ones(3)]
    order = (1, 0) if rank == 1 else (0, 1)
    works = [dist.all_reduce(values[one], group=others[one], async_op=True) for one in order]
    for work in works:
        work.wait()
    assert [value.tolist() for value in values] == [[dist.get_world_size()] * 2, [dist.get_world_size()] * 3]


def summed(tensor: Tensor, group: Any, asynchronous: bool) -> None:
    if work := dist.all_reduce(tensor, group=group, async_op=asynchronous):
        work.wait()


def test_a_group_stays_usable_after_a_mismatch(groups: tuple[Any, Any], rank: int) -> None:
    """Nothing of it has started."""
    gloo = groups[1]
    for asynchronous in (False, True):
        with pytest.raises(CollectiveMismatch, match=r"dist\.all_reduce sum float32 \[\d\]"):
            summed(torch.ones(4 + (rank == 1)), gloo, asynchronous)
        value = torch.ones(2)
        dist.all_reduce(value, group=gloo)
        assert value.tolist() == [dist.get_world_size()] * 2


def test_messages_of_different_sizes(groups: tuple[Any, Any], rank: int) -> None:
    """Gloo would end the receiver's process."""
    gloo = groups[1]
    if rank == 0:
        with pytest.raises(CollectiveMismatch, match=r"expected float32 \[8\], rank 1 receives float32 \[4\]"):
            dist.send(torch.ones(8), 1, group=gloo)
        dist.send(torch.ones(3), 1, group=gloo)
    elif rank == 1:
        with pytest.raises(CollectiveMismatch, match=r"expected float32 \[4\], rank 0 sends float32 \[8\]"):
            dist.recv(torch.zeros(4), 0, group=gloo)
        received = torch.zeros(3)
        assert dist.recv(received, group=gloo) == 0  # from any rank
        assert received.tolist() == [1.0] * 3


def test_many_messages_under_way(groups: tuple[Any, Any], rank: int) -> None:
    """Both ways at once, in the order of sending, with tags."""
    gloo = groups[1]
    if rank < 2:
        received = [torch.zeros(1000) for _ in range(8)]
        works = [dist.irecv(one, 1 - rank, group=gloo, tag=index % 2) for index, one in enumerate(received)]
        works += [dist.isend(torch.full((1000,), float(i)), 1 - rank, group=gloo, tag=i % 2) for i in range(8)]
        for work in works:
            assert work is not None
            work.wait()
        assert [one[0].item() for one in received] == list(range(8))
    exchanged = torch.zeros(5)
    size = dist.get_world_size()
    batch = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % size, gloo),
        dist.P2POp(dist.irecv, exchanged, (rank - 1) % size, gloo),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert exchanged[0].item() == (rank - 1) % size


def test_without_it(groups: tuple[Any, Any]) -> None:
    gloo = groups[1]
    gate.remove()
    try:
        before, value = operations(gloo), torch.ones(2)
        dist.all_reduce(value, group=gloo)
        assert value.tolist() == [dist.get_world_size()] * 2
        assert operations(gloo) == before
    finally:
        gate.install()


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_a_thread_of_gloo_never_waits_for_a_caller(groups: tuple[Any, Any]) -> None:
    """Gloo's thread may want the interpreter while it holds what the next call waits for."""
    tensor = torch.zeros(16384)
    for _ in range(1000):
        dist.all_reduce(tensor, group=groups[1], async_op=True).wait()
    assert not tensor.any()
