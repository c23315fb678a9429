"""A block that some ranks execute: they are all there are in it, and the others wait at its end."""

from __future__ import annotations

import contextlib
import sys
import time
from types import ModuleType

import pytest
import torch

from ring_notebook.errors import CollectiveAborted, CollectiveMismatch


def test_one_rank_executes_it_and_the_others_wait(hvd: ModuleType, size: int, rank: int) -> None:
    last = size - 1
    executed = []
    with hvd.only(last):
        time.sleep(0.2)
        executed.append(rank)
        assert (hvd.rank(), hvd.size()) == (0, 1)
    assert executed == ([last] if rank == last else [])
    assert (hvd.rank(), hvd.size()) == (rank, size)
    ended = hvd.allgather_object(time.monotonic())
    with hvd.only(0): executed.append("on one line")  # noqa: E701  # fmt: skip
    assert ("on one line" in executed) == (rank == 0)
    assert max(ended) - min(ended) < 15  # of one clock: nobody came out long before the others


def test_one_rank_of_each_host(hvd: ModuleType, size: int, rank: int) -> None:
    """On one host that is rank 0; `tests/hosts` has several."""
    seen = []
    with hvd.only(each_host=True):
        seen.append((hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item()))
        with hvd.only(each_host=True):
            seen.append("within")
    assert seen == ([(0, 1, 0.0), "within"] if rank == 0 else [])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    both = f"rank {rank}: only.. takes ranks or each_host=True, got both"
    with pytest.raises(ValueError, match=both), hvd.only(0, each_host=True):
        pass


@pytest.mark.sizes(3)
def test_ranks_that_ask_for_other_blocks_learn_it(hvd: ModuleType, rank: int) -> None:
    for _ in range(2):  # the generation goes on
        differs = pytest.raises(CollectiveMismatch, match=r"only\(each_host=True\)")
        with differs, hvd.only(*[1] * (rank == 0), each_host=rank > 0):
            pass
        hvd.barrier()


@pytest.mark.sizes(3, slow=(4,))
def test_its_collectives_are_of_its_ranks(hvd: ModuleType, rank: int) -> None:
    whole = hvd.add_process_set([0, 1])
    total = torch.zeros(1)
    with hvd.only(2, 0):
        assert hvd.rank() == [0, 2].index(rank)
        total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)
        with hvd.only(1):  # rank 2
            total += 10
            assert (hvd.rank(), hvd.size()) == (0, 1)
        assert hvd.broadcast_object(rank, 1) == 2
        if hvd.rank() == 0:
            hvd.send(torch.tensor([7]), 1)
        else:
            assert hvd.recv(total_sent := torch.zeros(1, dtype=torch.int64)) == 0
            assert total_sent.item() == 7
    assert total.item() == {0: 2.0, 2: 12.0}.get(rank, 0.0)
    if rank < 2:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=whole).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_it_may_be_a_loop_or_a_function_and_leaves_no_trace_function(hvd: ModuleType, rank: int) -> None:
    seen = []

    def work(number: int) -> int:
        with hvd.only(0):
            seen.append(number)
            if number == 1:
                return -1
        return number

    assert [work(number) for number in range(3)] == ([0, -1, 2] if rank == 0 else [0, 1, 2])
    assert seen == ([0, 1, 2] if rank == 0 else [])
    for number in range(3):
        with hvd.only(0):
            if number == 1:
                continue
            seen.append(number)
    assert seen == ([0, 1, 2, 0, 2] if rank == 0 else [])
    assert sys.gettrace() is None or "pytest" not in str(sys.gettrace())
    assert sys._getframe().f_trace is None


@pytest.mark.sizes(3)
def test_who_waits_learns_that_the_block_failed(hvd: ModuleType, rank: int) -> None:
    if rank == 1:
        with pytest.raises(KeyError), hvd.only(1):
            raise KeyError("no")
        hvd.shutdown()
    else:
        with pytest.raises(CollectiveAborted, match="rank 1"), hvd.only(1):
            raise AssertionError
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_wrong_ranks_are_an_error_on_every_rank(hvd: ModuleType, size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank}: .*expected ranks within 0\.\.{size - 1}"), hvd.only(size):
        raise AssertionError
    for wrong in [(), (0, 0)]:
        with pytest.raises(ValueError, match="at least one rank, and each once"), hvd.only(*wrong):
            raise AssertionError
    with pytest.raises(TypeError):
        hvd.only("0")
    with contextlib.ExitStack() as stack, pytest.raises(TypeError, match="`with` statement"):
        stack.enter_context(hvd.only(0))
    hvd.barrier()
