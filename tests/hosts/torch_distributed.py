"""Backend "ring" between hosts: beside Gloo, messages, wrappers and pipelines, and failures; run by all ranks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ring_notebook.torch as ring
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from ranks.process_group import test_against_gloo as beside_gloo
from ranks.process_group import test_point_to_point as messages
from ranks.process_group import test_wrappers as wrappers

KINDS = (torch.float32, torch.int64)


def check_operations() -> None:
    rank, size = ring.rank(), ring.size()
    groups = ring.process_group(), dist.new_group(backend="gloo")
    for dtype in KINDS:
        beside_gloo.test_movements(groups, dtype, size)
    beside_gloo.test_reductions(groups, torch.float32, size)
    beside_gloo.test_objects(groups, size)
    beside_gloo.test_subgroups(groups, size)
    for count in (0, 3, 200_000):
        messages.test_around_the_ring(torch.float32, count, rank, size)
    messages.test_any_source(rank, size)
    messages.test_a_strided_tensor(rank)
    same = torch.zeros(5)
    if rank == 0:
        ring.send(torch.arange(5.0), size - 1)
    elif rank == size - 1:
        assert ring.recv(same) == 0
        assert same.tolist() == [0, 1, 2, 3, 4]


def check_training() -> None:
    rank, size = ring.rank(), ring.size()
    for wrap in (wrappers.with_views, wrappers.sharded):
        wrappers.test_training_equals_that_of_one_process(wrap, rank, size)


def check_failures() -> None:
    """A rank that waits for a message of another host learns that a rank has failed, and of a size that differs."""
    rank, size = ring.rank(), ring.size()
    if rank == 0:
        with pytest.raises(CollectiveMismatch, match=f"rank {size - 1} expected 50001"):
            dist.send(torch.ones(50_000), size - 1)
    elif rank == size - 1:
        with pytest.raises(CollectiveMismatch, match="got 50000 elements"):
            dist.recv(torch.ones(50_001), 0)
    dist.barrier()
    if rank == size - 1:
        world.fail(ValueError("boom"))
    else:
        with pytest.raises(CollectiveAborted, match=f"rank {size - 1} raised ValueError: boom"):
            dist.recv(torch.ones(50_001), size - 1)
    ring.shutdown()
    ring.init()
    ring.process_group()
    check_training()


def main() -> None:
    warnings.simplefilter("ignore")  # newer names exist in newer versions of torch alone
    ring.init()
    ring.process_group()
    check_operations()
    check_training()
    check_failures()
    sys.stdout.write(f"rank {ring.rank()} of {ring.size()} on {ring.cross_size()} hosts: all is well\n")
    dist.destroy_process_group()
    ring.shutdown()


if __name__ == "__main__":
    main()
