"""Threads of Gloo's: seen to be in an operation as long as one of them is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ring_notebook.torch as hvd
from harness.waiting import until
from ring_notebook.torch.process_group.foreign_waits import foreign_threads_rest

pytestmark = [pytest.mark.sizes(3), pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning")]


def test_a_sum_that_one_rank_has_begun(rank: int) -> None:
    hvd.init()
    hvd.process_group("gloo")
    dist.barrier()
    until(foreign_threads_rest)
    if rank:
        hvd.barrier()
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    assert pending is not None
    if rank == 0:
        until(lambda: not foreign_threads_rest())
        assert foreign_threads_rest()  # that one is given up
        hvd.barrier()
    pending.wait()
    until(foreign_threads_rest)
    dist.destroy_process_group()
    hvd.shutdown()
