"""Collectives that move tensors or wait, and what all collectives have in common: odd shapes, names, mismatches."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ranks.values import FLOATS, INTEGERS, all_data, data


def test_tensors_that_are_not_contiguous(hvd: ModuleType) -> None:
    everyone = all_data(hvd, torch.float32, (4, 6))
    mine = data(hvd.rank(), torch.float32, (4, 6))
    assert torch.equal(hvd.allreduce(mine.t(), op=hvd.Sum), everyone.sum(0).t().float())
    holder = mine.clone()
    hvd.allreduce_(holder[:, ::2], op=hvd.Sum)
    assert torch.equal(holder[:, ::2], everyone.sum(0)[:, ::2].float())
    assert torch.equal(holder[:, 1::2], mine[:, 1::2])
    hvd.broadcast_(holder.t()[1:2], root_rank=hvd.size() - 1)
    assert torch.equal(holder[:, 1], everyone[-1][:, 1].float())
    assert torch.equal(hvd.allgather(mine.t()), everyone.transpose(1, 2).reshape(-1, 4).float())


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)], ids=str)
def test_odd_shapes(hvd: ModuleType, shape: tuple[int, ...]) -> None:
    mine = torch.full(shape, float(hvd.rank()))
    total = sum(range(hvd.size()))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), torch.full(shape, float(total)))
    assert torch.equal(hvd.broadcast(mine, 0), torch.zeros(shape))
    gathered = hvd.allgather(mine)
    rows = shape or (1,)
    assert gathered.shape == (rows[0] * hvd.size(), *rows[1:])


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_allgather_of_uneven_rows(hvd: ModuleType, dtype: torch.dtype) -> None:
    parts = [data(rank, dtype, (rank + 1, 2)) for rank in range(hvd.size())]
    expected = torch.cat(parts)
    mine = parts[hvd.rank()]
    for result in (hvd.allgather(mine), hvd.synchronize(hvd.allgather_async(mine, name="rows"))):
        assert result.dtype is dtype
        assert torch.equal(result, expected)


def test_grouped_allgather(hvd: ModuleType) -> None:
    def parts(rank: int) -> list[Tensor]:
        return [data(rank, torch.float32, (rank, 3)), data(rank, torch.int16, (2,)), torch.tensor(rank)]

    expected = [
        torch.cat([part.reshape(-1, *part.shape[1:]) for part in column])
        for column in zip(*map(parts, range(hvd.size())), strict=True)
    ]
    for result in (
        hvd.grouped_allgather(parts(hvd.rank()), name="group"),
        hvd.synchronize(hvd.grouped_allgather_async(parts(hvd.rank()), name="group")),
    ):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_broadcast_forms(hvd: ModuleType) -> None:
    for root in range(hvd.size()):
        expected = data(root, torch.float32)
        mine = data(hvd.rank(), torch.float32)
        assert torch.equal(hvd.broadcast(mine, root), expected)
        assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root, name="async")), expected)
        assert torch.equal(mine, data(hvd.rank(), torch.float32))
        first, second = mine.clone(), mine.clone()
        assert hvd.broadcast_(first, root) is first
        assert hvd.synchronize(hvd.broadcast_async_(second, root)) is second
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


def test_alltoall_with_and_without_splits(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()

    def rows(source: int, target: int) -> Tensor:
        return torch.full((source + target, 2), 10 * source + target)

    mine = torch.cat([rows(rank, target) for target in range(size)])
    splits = [rank + target for target in range(size)]
    expected = torch.cat([rows(source, rank) for source in range(size)])
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        for output, received in (
            hvd.alltoall(mine, splits=given),
            hvd.synchronize(hvd.alltoall_async(mine, splits=given, name="rows")),
        ):
            assert torch.equal(output, expected)
            assert received.tolist() == [source + rank for source in range(size)]
            assert received.dtype is torch.int32
    even = torch.arange(2 * size) + 100 * rank
    expected = torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 100 * source for source in range(size)])
    assert torch.equal(hvd.alltoall(even), expected)
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(even)), expected)
    if size > 1:
        with pytest.raises(ValueError, match="give splits"):
            hvd.alltoall(torch.ones(size + 1))
    output, received = hvd.alltoall(torch.empty(size, 0), splits=[1] * size)
    assert output.shape == (size, 0)
    assert received.tolist() == [1] * size


def test_a_name_is_used_once_at_a_time(hvd: ModuleType) -> None:
    tensor = torch.ones(3)
    handle = hvd.allreduce_async(tensor, name="loss")
    with pytest.raises(ValueError, match="'loss' is already running"):
        hvd.allreduce_async(tensor, name="loss")
    hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async(tensor, name="loss"))


@pytest.mark.parametrize("kind", ["shape", "dtype", "op", "operation", "root"])
def test_disagreement_raises_on_every_rank_and_the_job_goes_on(hvd: ModuleType, kind: str) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    odd = hvd.rank() == hvd.size() - 1
    tensor = torch.ones(3)
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(4 if odd else 3)),
        "dtype": lambda: hvd.allreduce(tensor.double() if odd else tensor),
        "op": lambda: hvd.allreduce(tensor, op=hvd.Max if odd else hvd.Sum),
        "operation": lambda: hvd.broadcast(tensor, 0) if odd else hvd.allreduce(tensor),
        "root": lambda: hvd.broadcast(tensor, root_rank=int(odd)),
    }
    with pytest.raises(RuntimeError, match=r"(?s)rank \d.*rank \d"):
        calls[kind]()
    assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), tensor * hvd.size())


def test_barrier_waits_for_the_last(hvd: ModuleType) -> None:
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.2)
    came = time.monotonic()
    hvd.barrier()
    left = time.monotonic()
    times = hvd.allgather_object((came, left))  # of one clock
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_join_counts_zeros_and_names_the_last(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):  # rank r makes r + 1 steps
        still_there = [r for r in range(size) if r >= step]
        result = hvd.allreduce(torch.full((3,), float(rank + 1)), op=hvd.Average, name=f"step {step}")
        assert torch.allclose(result, torch.full((3,), sum(r + 1.0 for r in still_there) / size))
    assert hvd.join() == size - 1
    assert torch.equal(hvd.allgather(torch.tensor([rank])), torch.arange(size))


BESIDE_JOIN: dict[str, Callable[[ModuleType], object]] = {
    "allgather": lambda hvd: hvd.allgather(torch.ones(1)),
    "broadcast_object": lambda hvd: hvd.broadcast_object([torch.ones(3), "text"], hvd.size() - 1),
    "two at once": lambda hvd: hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1), torch.ones(2)], "pair")),
    "sparse": lambda hvd: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "sparse", hvd.Sum)(),
    "alltoall": lambda hvd: hvd.alltoall(torch.ones(hvd.size())),
}


@pytest.mark.parametrize("operation", BESIDE_JOIN)
def test_what_a_joined_rank_does_not_serve_fails_where_it_is_called(hvd: ModuleType, operation: str) -> None:
    """The rank that has joined stays joined, and adds nothing to what the others call next."""
    if hvd.size() == 1:
        pytest.skip("there is nobody to wait for")
    if hvd.rank() != 0:
        with pytest.raises(hvd.HorovodInternalError, match="joined"):
            BESIDE_JOIN[operation](hvd)
        others = float(hvd.size() - 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == others
    assert hvd.join() > 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    hvd.barrier()
