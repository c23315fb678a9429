"""allreduce, reducescatter, their grouped, sparse and compressed forms: results against a float64 reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ranks.values import FLOATS, INTEGERS, all_data, data
from ring_notebook.errors import CollectiveMismatch


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_allreduce_reduces_every_dtype(hvd: ModuleType, dtype: torch.dtype) -> None:
    everyone = all_data(hvd, dtype)
    mean = everyone.mean(0) if dtype.is_floating_point else everyone.mean(0).trunc()
    expected = {
        hvd.Sum: everyone.sum(0),
        hvd.Average: mean,
        hvd.Min: everyone.amin(0),
        hvd.Max: everyone.amax(0),
        hvd.Product: everyone.prod(0),
    }
    for op, reference in expected.items():
        tensor = data(hvd.rank(), dtype)
        result = hvd.allreduce(tensor, op=op)
        assert result.dtype is dtype
        torch.testing.assert_close(
            result, reference.to(dtype), rtol=torch.finfo(dtype).eps if dtype in FLOATS else 0, atol=0
        )
        assert torch.equal(tensor, data(hvd.rank(), dtype)), "the input is left alone"


def test_allreduce_averages_by_default_and_takes_horovods_old_argument(hvd: ModuleType) -> None:
    everyone = all_data(hvd, torch.float32)
    mine = data(hvd.rank(), torch.float32)
    torch.testing.assert_close(hvd.allreduce(mine), everyone.mean(0).float())
    torch.testing.assert_close(hvd.allreduce(mine, average=True), everyone.mean(0).float())
    torch.testing.assert_close(hvd.allreduce(mine, average=False), everyone.sum(0).float())


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_scaling_of_integers_truncates_and_of_halves_goes_through_float32(hvd: ModuleType, op: str) -> None:
    size = hvd.size()
    whole = torch.tensor([7, -7, 3], dtype=torch.int32)
    share = size if op == "Sum" else 1
    result = hvd.allreduce(whole, op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=3.0)
    # Truncated once before and once after the sum: 7 * 0.5 = 3.5 -> 3.
    assert result.tolist() == [int(3 * share * 3), int(-3 * share * 3), int(1 * share * 3)]
    half = torch.full((4,), 60000.0, dtype=torch.float16)  # the sum would overflow float16
    torch.testing.assert_close(hvd.allreduce(half, op=hvd.Average), half)
    assert torch.allclose(hvd.allreduce(half, op=hvd.Sum, postscale_factor=1 / size), half)


def test_allreduce_forms_agree(hvd: ModuleType) -> None:
    mine, expected = data(hvd.rank(), torch.float64), all_data(hvd, torch.float64).sum(0)
    in_place = mine.clone()
    assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
    handle = hvd.allreduce_async(mine, op=hvd.Sum, name="out of place")
    later = mine.clone()
    other = hvd.allreduce_async_(later, op=hvd.Sum, name="in place")
    result = hvd.synchronize(handle)
    assert hvd.synchronize(other) is later
    assert hvd.poll(handle)
    for tensor in (in_place, result, later):
        assert torch.equal(tensor, expected)


def test_grouped_allreduce_forms_agree_over_mixed_dtypes_and_shapes(hvd: ModuleType) -> None:
    kinds = [
        (torch.float32, (3,)),
        (torch.int64, (2, 2)),
        (torch.float32, ()),
        (torch.float16, (0, 4)),
        (torch.float32, (9,)),
    ]
    expected = [all_data(hvd, dtype, shape).sum(0).to(dtype) for dtype, shape in kinds]

    def mine() -> list[Tensor]:
        return [data(hvd.rank(), dtype, shape) for dtype, shape in kinds]

    given = mine()
    in_place = hvd.grouped_allreduce_(given, op=hvd.Sum)
    assert all(a is b for a, b in zip(in_place, given, strict=True))
    later = mine()
    results = [
        in_place,
        hvd.grouped_allreduce(mine(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine(), op=hvd.Sum)),
        hvd.synchronize(hvd.grouped_allreduce_async_(later, op=hvd.Sum)),
    ]
    for result in results:
        assert [tensor.dtype for tensor in result] == [dtype for dtype, _ in kinds]
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(later, expected, strict=True))


@pytest.mark.parametrize("name", ["list", None], ids=["by name", "in order"])
def test_lists_of_unequal_numbers_of_dtypes_or_tensors(hvd: ModuleType, name: str | None) -> None:
    """An error on every rank; before, ranks that had more than others waited."""
    if hvd.size() == 1:
        pytest.skip("a rank alone agrees with itself")
    odd = hvd.rank() == 1
    mixed = [torch.ones(3), *([torch.ones(3, dtype=torch.float64)] if odd else [])]
    longer = [torch.ones(2, 2)] * (3 if odd else 2)
    handles = {
        "2 dtypes": hvd.grouped_allreduce_async_(mixed, name=name),
        "3 tensors": hvd.grouped_allgather_async(longer, name=name and "gathered"),
        "a list of 3": hvd.grouped_reducescatter_async(longer, name=name and "scattered"),
    }
    for text, handle in handles.items():
        with pytest.raises(CollectiveMismatch, match=text):
            hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3


def test_compression(hvd: ModuleType) -> None:
    class Tenth:
        """Sends a tenth of each value, as float64."""

        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
            return tensor.double() / 10, tensor.dtype

        @staticmethod
        def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
            return (tensor * 10).to(ctx)

    expected = all_data(hvd, torch.float32).mean(0).float()
    mine = data(hvd.rank(), torch.float32)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Tenth):
        for result in (
            hvd.allreduce(mine, compression=compression),
            hvd.grouped_allreduce([mine], compression=compression)[0],
        ):
            assert result.dtype is torch.float32
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=0)
    assert hvd.Compression.fp16.compress(mine)[0].dtype is torch.float16
    assert hvd.Compression.bf16.compress(mine)[0].dtype is torch.bfloat16
    assert hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.int32))[0].dtype is torch.int32


def test_a_sign_that_is_not_in_memory(hvd: ModuleType) -> None:
    """The imaginary part of a conjugate is a view with torch's negative bit."""
    size = hvd.size()
    parts = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j, 7 + 8j] * size).conj().imag
    expected = parts.clone()
    torch.testing.assert_close(hvd.allreduce(parts, op=hvd.Sum), expected * size)
    torch.testing.assert_close(hvd.broadcast(parts, 0), expected)
    torch.testing.assert_close(hvd.allgather(parts[:2]), expected[:2].repeat(size))
    torch.testing.assert_close(hvd.reducescatter(parts, op=hvd.Sum), expected[:4] * size)
    torch.testing.assert_close(hvd.alltoall(parts), expected[4 * hvd.rank() : 4 * hvd.rank() + 4].repeat(size))
    torch.testing.assert_close(hvd.broadcast_object(parts, 0), expected)
    hvd.allreduce_(parts, op=hvd.Sum)
    torch.testing.assert_close(parts.clone(), expected * size)


def test_several_threads_wait_for_one_handle(hvd: ModuleType) -> None:
    handle = hvd.allreduce_async(torch.ones(300_000), op=hvd.Sum)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(hvd.synchronize, [handle] * 8):
            assert result[-1] == hvd.size()


@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_reducescatter_of_uneven_rows(hvd: ModuleType, rows: int) -> None:
    size, rank = hvd.size(), hvd.rank()
    everyone = all_data(hvd, torch.float32, (rows, 3))
    counts = [rows // size + (r < rows % size) for r in range(size)]
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = data(rank, torch.float32, (rows, 3))
    average, total = everyone.mean(0)[own].float(), everyone.sum(0)[own].float()
    torch.testing.assert_close(hvd.reducescatter(mine), average)
    torch.testing.assert_close(hvd.reducescatter(mine, compression=hvd.Compression.fp16), average, rtol=1e-3, atol=0)
    torch.testing.assert_close(hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum)), total)
    torch.testing.assert_close(
        hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), total / 2
    )
    grouped = hvd.grouped_reducescatter([mine, mine.double()], op=hvd.Sum, name="group")
    later = hvd.synchronize(hvd.grouped_reducescatter_async([mine, mine.double()], op=hvd.Sum, name="group"))
    for pair in (grouped, later):
        torch.testing.assert_close(pair[0], total)
        torch.testing.assert_close(pair[1], total.double())


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_sparse_allreduce(hvd: ModuleType, op: str) -> None:
    def table(rank: int) -> Tensor:
        rows = torch.tensor([[rank, 2 * rank, 2 * rank]])  # a row twice, and rows that ranks share
        return torch.sparse_coo_tensor(rows, data(rank, torch.float32, (3, 4)), (9, 4), check_invariants=True)

    dense = torch.stack([table(rank).to_dense() for rank in range(hvd.size())])
    expected = dense.sum(0) if op == "Sum" else dense.mean(0)
    result = hvd.sparse_allreduce_async(table(hvd.rank()), name="table", op=getattr(hvd, op))()
    assert result.is_sparse
    torch.testing.assert_close(result.to_dense(), expected)


@pytest.mark.sizes(1, 2, 3, slow=(4,))  # two are combined, three are refused
def test_adasum_of_each_tensor(hvd: ModuleType) -> None:
    """Maleki et al. 2020: parts of two gradients that are parallel are averaged, parts at right angles added."""

    def combine(vectors: list[Tensor]) -> Tensor:
        if len(vectors) == 1:
            return vectors[0]
        half = len(vectors) // 2
        a, b = combine(vectors[:half]), combine(vectors[half:])
        dot = (a * b).sum()
        return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b

    mine = [data(hvd.rank(), torch.float64, shape) for shape in ((6,), (2, 5))]
    if hvd.size() == 3:
        with pytest.raises(ValueError, match="power of two"):
            hvd.allreduce(mine[0], op=hvd.Adasum)
        return
    for result, shape in zip(hvd.grouped_allreduce(mine, op=hvd.Adasum), ((6,), (2, 5)), strict=True):
        torch.testing.assert_close(result, combine(list(all_data(hvd, torch.float64, shape))))
