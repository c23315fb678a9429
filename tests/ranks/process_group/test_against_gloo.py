"""Every operation of torch.distributed on backend "ring" beside Gloo: the same values, synchronous and asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

# Newer names exist in newer versions of torch alone.
pytestmark = [
    pytest.mark.usefixtures("groups"),
    pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning"),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
Case = Callable[[Any, bool], Any]


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Small numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(7 * dist.get_rank() + len(shape))
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn((*shape, 2), generator=generator)).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(dtype)


def same(ours: Any, theirs: Any) -> None:
    """Compare nested results; sums of floats may differ in their last digits."""
    if isinstance(ours, Tensor):
        exact = not (ours.dtype.is_floating_point or ours.dtype.is_complex)
        tolerance = 0.0 if exact else 2e-2 if ours.dtype in (torch.float16, torch.bfloat16) else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def compare(groups: tuple[Any, Any], case: Case) -> None:
    """Run ``case(group, async_op)`` on both; where Gloo lacks the operation, the two ways of ours have to agree."""
    ring, gloo = groups
    ours = [case(ring, False), case(ring, True)]
    same(ours[0], ours[1])
    try:
        theirs = case(gloo, False)
    except (RuntimeError, ValueError, TypeError):
        return
    same(ours[0], theirs)


def wait(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()
        assert work.is_completed()
        assert work.is_success()


def supported(dtype: torch.dtype, op: str) -> bool:
    """Whether the operation means something for the type."""
    if op in ("BAND", "BOR", "BXOR"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (dtype.is_complex and op not in ("SUM", "AVG")) and not (dtype == torch.bool and op == "AVG")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(groups: tuple[Any, Any], dtype: torch.dtype, size: int) -> None:
    root = size - 1
    for name in OPS:
        if not supported(dtype, name):
            continue
        op = getattr(dist.ReduceOp, name)
        for shape in [(5, 7), (40001,), (), (0,)]:

            def all_reduce(group: Any, async_op: bool, shape: Any = shape, op: Any = op) -> Tensor:
                tensor = values(dtype, *shape)
                wait(dist.all_reduce(tensor, op=op, group=group, async_op=async_op), async_op)
                return tensor

            compare(groups, all_reduce)

        def reduce(group: Any, async_op: bool, op: Any = op) -> Any:
            tensor = values(dtype, 6)
            before = tensor.clone()
            wait(dist.reduce(tensor, root, op=op, group=group, async_op=async_op), async_op)
            if dist.get_rank() != root and group is groups[0]:
                assert torch.equal(tensor, before)
            return tensor if dist.get_rank() == root else None

        def reduce_scatter_tensor(group: Any, async_op: bool, op: Any = op) -> Tensor:
            output = torch.empty(4, 3, dtype=dtype)
            wait(
                dist.reduce_scatter_tensor(output, values(dtype, 4 * size, 3), op=op, group=group, async_op=async_op),
                async_op,
            )
            return output

        def reduce_scatter(group: Any, async_op: bool, op: Any = op) -> Tensor:
            output = torch.empty(4, 3, dtype=dtype)
            parts = list(values(dtype, 4 * size, 3).chunk(size))
            wait(dist.reduce_scatter(output, parts, op=op, group=group, async_op=async_op), async_op)
            return output

        for case in (reduce, reduce_scatter_tensor, reduce_scatter):
            compare(groups, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movements(groups: tuple[Any, Any], dtype: torch.dtype, size: int) -> None:
    rank, root = dist.get_rank(), size - 1

    def broadcast(group: Any, async_op: bool) -> Tensor:
        tensor = values(dtype, 6, 3)
        wait(dist.broadcast(tensor, root, group=group, async_op=async_op), async_op)
        return tensor

    def broadcast_strided(group: Any, async_op: bool) -> Tensor:
        tensor = values(dtype, 6, 3).t()
        wait(dist.broadcast(tensor, 0, group=group, async_op=async_op), async_op)
        return tensor

    def all_gather(group: Any, async_op: bool) -> list[Tensor]:
        outputs = [torch.empty(3, 2, dtype=dtype) for _ in range(size)]
        wait(dist.all_gather(outputs, values(dtype, 3, 2), group=group, async_op=async_op), async_op)
        return outputs

    def all_gather_large(group: Any, async_op: bool) -> Tensor:
        output = torch.empty(70000 * size, 2, dtype=dtype)
        wait(dist.all_gather_into_tensor(output, values(dtype, 70000, 2), group=group, async_op=async_op), async_op)
        return output

    def gather(group: Any, async_op: bool) -> list[Tensor] | None:
        outputs = [torch.empty(3, 2, dtype=dtype) for _ in range(size)] if rank == root else None
        wait(dist.gather(values(dtype, 3, 2), outputs, root, group=group, async_op=async_op), async_op)
        return outputs

    def scatter(group: Any, async_op: bool) -> Tensor:
        output = torch.empty(3, 2, dtype=dtype)
        parts = list(values(dtype, 3 * size, 2).chunk(size)) if rank == root else None
        wait(dist.scatter(output, parts, root, group=group, async_op=async_op), async_op)
        return output

    def all_to_all_single(group: Any, async_op: bool) -> Tensor:
        output = torch.empty(2 * size, 3, dtype=dtype)
        wait(dist.all_to_all_single(output, values(dtype, 2 * size, 3), group=group, async_op=async_op), async_op)
        return output

    def all_to_all_uneven(group: Any, async_op: bool) -> Tensor:
        splits = [(rank + other) % 3 for other in range(size)]
        output = torch.empty(sum(splits), 3, dtype=dtype)
        work = dist.all_to_all_single(
            output, values(dtype, sum(splits), 3), splits, splits, group=group, async_op=async_op
        )
        wait(work, async_op)
        return output

    def all_to_all(group: Any, async_op: bool) -> list[Tensor]:
        outputs = [torch.empty(other + 1, 3, dtype=dtype) for other in range(size)]
        inputs = [values(dtype, rank + 1, 3) for _ in range(size)]
        wait(dist.all_to_all(outputs, inputs, group=group, async_op=async_op), async_op)
        return outputs

    for case in (
        broadcast,
        broadcast_strided,
        all_gather,
        all_gather_large,
        gather,
        scatter,
        all_to_all_single,
        all_to_all_uneven,
        all_to_all,
    ):
        compare(groups, case)


def test_objects(groups: tuple[Any, Any], size: int) -> None:
    def objects(group: Any, async_op: bool) -> Any:
        rank = dist.get_rank()
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "x": [1] * rank}, group=group)
        sent = [{"q": 1} if rank == 0 else None]
        dist.broadcast_object_list(sent, 0, group=group)
        got: list[Any] = [None]
        dist.scatter_object_list(got, [f"for {other}" for other in range(size)] if rank == 0 else None, 0, group=group)
        root: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(("g", rank), root, 0, group=group)
        return gathered, sent, got, root

    compare(groups, objects)


def test_coalesced(groups: tuple[Any, Any]) -> None:
    """Several tensors as one operation, also of several types and layouts."""

    def managed(group: Any, async_op: bool) -> list[Tensor]:
        tensors = [values(torch.float32, 3), values(torch.float32, 4, 2).t()]
        with dist._coalescing_manager(group=group, async_ops=async_op) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        if async_op:
            manager.wait()
        return tensors

    compare(groups, managed)
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4)]
    groups[0].allreduce_coalesced(tensors).wait()
    size = dist.get_world_size()
    assert [tensor.sum().item() for tensor in tensors] == [3 * size, 2 * size, 4 * size]

    def gathered(group: Any, _async_op: bool) -> list[Tensor]:
        inputs = [values(torch.float32, 3), values(torch.float32, 2, 2)]
        outputs = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(size)]
        group.allgather_coalesced(outputs, inputs).wait()
        return [tensor for some in outputs for tensor in some]

    compare(groups, gathered)
    with pytest.raises(ValueError, match=rf"expected {size} lists of 1 tensors .* make one list for each rank"):
        groups[0].allgather_coalesced([[torch.ones(2)]] * (size + 1), [torch.ones(2)])


@pytest.mark.parametrize("dims", [1, 2])
def test_sparse_tensors(groups: tuple[Any, Any], dims: int, rank: int) -> None:
    """Sums of entries in other places and other numbers on each rank, as gradients of embeddings are."""

    def summed(group: Any, _async_op: bool) -> list[Tensor]:
        dense = torch.zeros(6, 4)
        dense[: rank + 1] = values(torch.float32, rank + 1, 4)
        tensor = (dense if rank != 1 else torch.zeros(6, 4)).to_sparse(dims)
        dist.all_reduce(tensor, group=group)
        return [tensor.coalesce().to_dense()]

    compare(groups, summed)
    mean = torch.eye(3).to_sparse()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(mean.to_dense(), torch.eye(3))


def test_strided_tensors(groups: tuple[Any, Any], size: int) -> None:
    """The values between those of a strided tensor stay as they are. (Gloo takes its memory for contiguous.)"""
    whole = values(torch.float32, 3, 8)
    before = whole.clone()
    dist.all_reduce(whole.t()[::2])
    everyone = [torch.empty(3, 8) for _ in range(size)]
    dist.all_gather(everyone, before)
    torch.testing.assert_close(whole[:, ::2], torch.stack(everyone).sum(0)[:, ::2])
    assert torch.equal(whole[:, 1::2], before[:, 1::2])


def test_functional_collectives(groups: tuple[Any, Any], size: int) -> None:
    def calls(group: Any, async_op: bool) -> list[Tensor]:
        tensor = values(torch.float32, 4, 2)
        results = [
            functional.all_reduce(tensor, "sum", group),
            functional.all_gather_tensor(tensor, 0, group),
            functional.reduce_scatter_tensor(values(torch.float32, 4 * size, 2), "sum", 0, group),
            functional.all_to_all_single(values(torch.float32, 2 * size), None, None, group),
            functional.broadcast(tensor, 0, group),
            *functional.all_reduce_coalesced([tensor, tensor], "sum", group),
            *functional.all_gather_into_tensor_coalesced([tensor, tensor], group),
        ]
        return [result + 0 for result in results]

    compare(groups, calls)


def test_gradients(groups: tuple[Any, Any]) -> None:
    def gradient(group: Any, async_op: bool) -> Tensor:
        tensor = values(torch.float32, 4).requires_grad_()
        differentiable.all_reduce(tensor * (dist.get_rank() + 1), group=group).square().sum().backward()
        assert tensor.grad is not None
        return tensor.grad

    compare(groups, gradient)


def test_futures(groups: tuple[Any, Any], size: int) -> None:
    """A future holds the tensors; what is called on it gets them."""
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, group=groups[0], async_op=True).get_future()
    assert future.wait()[0] is tensor
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2 * size] * 3


def test_barrier(groups: tuple[Any, Any]) -> None:
    dist.barrier(group=groups[0])
    dist.barrier(group=groups[0], async_op=True).wait()


def test_subgroups(groups: tuple[Any, Any], size: int) -> None:
    """Groups that the default group's ranks make together, and one that its members make alone."""
    rank = dist.get_rank()
    for ranks in ([0], list(range(size)), list(range(size - 1, -1, -1))):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            assert dist.get_backend(group) == "ring"
            dist.destroy_process_group(group)
    if size > 1:
        last = [size - 2, size - 1]
        if rank in last:
            alone = dist.new_group(last, use_local_synchronization=True)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=alone)
            assert tensor.item() == 2
            dist.destroy_process_group(alone)
    part = groups[0].split_group([rank])
    assert part.size() == 1


def test_device_mesh(groups: tuple[Any, Any], size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert tensor.tolist() == [size] * 2
    assert mesh.get_local_rank("inner") == dist.get_rank()
