"""gather, scatter and allgather into outputs that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ring_notebook.torch as hvd
from ring_notebook.errors import CollectiveMismatch


@pytest.fixture(autouse=True)
def generation() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("count", [3, 100_000])
def test_gather_and_scatter(rank: int, size: int, count: int) -> None:
    """To and from one rank, in outputs that are given or made."""
    root = size - 1
    own = torch.arange(2 * count).view(count, 2).float() + rank
    whole = torch.cat([torch.arange(2 * count).view(count, 2).float() + other for other in range(size)])
    given = torch.empty(size * count, 2) if rank == root else None
    for output in (None, given):
        result = hvd.gather(own, root, output)
        assert (result is None) == (rank != root)
        if result is not None:
            assert torch.equal(result, whole)
            assert output is None or result is output
    uneven = hvd.gather(own[: rank + 1], root)
    if uneven is not None:
        assert uneven.shape == (sum(min(other + 1, count) for other in range(size)), 2)
    for output in (None, torch.empty(3 * size, 0) if rank == root else None):
        boxes = hvd.gather(torch.empty(3, 0), root, output)
        assert boxes is None if rank != root else boxes.shape == (3 * size, 0)
    strided = torch.empty(count, 4)[:, ::2]
    for output in (torch.empty(count, 2), strided):
        assert hvd.scatter(output, whole if rank == root else None, root) is output
        assert torch.equal(output, own)


def test_allgather_into_an_output(rank: int, size: int) -> None:
    for count in (2, 100_000):
        output = torch.empty(size * count)
        assert hvd.allgather_into(output, torch.full((count,), float(rank))) is output
        assert output.view(size, count)[:, 0].tolist() == list(range(size))
        parts = output.clone().view(size, count)
        strided = torch.empty(2 * size, count)[::2]
        assert torch.equal(hvd.allgather_into(strided, parts[rank : rank + 1]), parts)


@pytest.mark.sizes(3)
def test_other_roots(rank: int, size: int) -> None:
    root = int(rank == 1)
    with pytest.raises(CollectiveMismatch, match="call it with the same root rank on every rank"):
        hvd.gather(torch.ones(2), root)
    with pytest.raises(CollectiveMismatch, match="call it with the same root rank on every rank"):
        hvd.scatter(torch.empty(1), torch.ones(size) if rank == root else None, root)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def test_outputs_of_another_size(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank}: allgather: expected an output of {2 * size} elements"):
        hvd.allgather_into(torch.empty(2 * size + 1), torch.ones(2))
    with pytest.raises(ValueError, match=f"rank {rank}: allgather: .*float32, got {2 * size} of torch.int32"):
        hvd.allgather_into(torch.empty(2 * size, dtype=torch.int32), torch.ones(2))
    if rank:
        with pytest.raises(ValueError, match=f"rank {rank}: scatter: expected an output of 1 elements"):
            hvd.scatter(torch.empty(2))
    else:
        hvd.scatter(torch.empty(1), torch.ones(size))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
