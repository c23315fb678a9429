"""Backend "ring" between hosts: beside Gloo, messages, wrappers and pipelines, and failures; run by all ranks."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_notebook.torch as ring
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from ranks.process_group import test_against_gloo as beside_gloo
from ranks.process_group import test_parallelisms as parallelisms
from ranks.process_group import test_point_to_point as messages
from ranks.process_group import test_wrappers as wrappers

KINDS = beside_gloo.DTYPES if "every dtype" in sys.argv else [torch.float32, torch.int64]


def check_operations(groups: tuple[Any, Any]) -> None:
    rank, size = ring.rank(), ring.size()
    for dtype in KINDS:
        beside_gloo.test_movements(groups, dtype, size)
        beside_gloo.test_reductions(groups, dtype, size)
        for count in (0, 3, 200_000):
            messages.test_around_the_ring(dtype, count, rank, size)
    beside_gloo.test_objects(groups, size)
    beside_gloo.test_subgroups(groups, size)
    beside_gloo.test_coalesced(groups)
    for dims in (1, 2):
        beside_gloo.test_sparse_tensors(groups, dims, rank)
    beside_gloo.test_strided_tensors(groups, size)
    beside_gloo.test_functional_collectives(groups, size)
    beside_gloo.test_gradients(groups)
    beside_gloo.test_futures(groups, size)
    beside_gloo.test_barrier(groups)
    beside_gloo.test_device_mesh(groups, size)
    messages.test_any_source(rank, size)
    messages.test_a_strided_tensor(rank)
    same = torch.zeros(5)
    if rank == 0:
        ring.send(torch.arange(5.0), size - 1)
    elif rank == size - 1:
        assert ring.recv(same) == 0
        assert same.tolist() == [0, 1, 2, 3, 4]


def check_parallelisms(groups: tuple[Any, Any]) -> None:
    for name in parallelisms.CASES:
        parallelisms.test_as_on_gloo(groups, name, ring.size())


def set_ring(**values: str) -> None:
    for name, value in values.items():
        os.environ[f"RING_{name.upper()}"] = value
    config.cache_clear()


def check_training() -> None:
    for wrap, overlap in ((wrappers.with_views, "inline"), (wrappers.with_views, "thread"), (wrappers.sharded, "auto")):
        wrappers.test_training_equals_that_of_one_process(wrap, overlap, ring.rank(), ring.size(), set_ring)


def meet_and_receive(source: int) -> None:
    dist.barrier()
    dist.recv(torch.ones(50_001), source)


def check_failures() -> None:
    """A rank that waits for a message of another host learns that a rank has failed, and of a size that differs."""
    rank, size = ring.rank(), ring.size()
    if rank == 0:
        with pytest.raises(CollectiveMismatch, match=f"rank {size - 1} expected 50001"):
            dist.send(torch.ones(50_000), size - 1)
    elif rank == size - 1:
        with pytest.raises(CollectiveMismatch, match="got 50000 elements"):
            dist.recv(torch.ones(50_001), 0)
    if rank == size - 1:
        dist.barrier()
        world.fail(ValueError("boom"))
    else:
        with pytest.raises(CollectiveAborted, match=f"rank {size - 1} raised ValueError: boom"):
            meet_and_receive(size - 1)  # which may fail before this rank has left the barrier
    ring.shutdown()
    ring.init()
    ring.process_group()
    check_training()


def main() -> None:
    warnings.simplefilter("ignore")  # newer names exist in newer versions of torch alone
    ring.init()
    groups = ring.process_group(), dist.new_group(backend="gloo")
    check_operations(groups)
    check_parallelisms(groups)
    check_training()
    check_failures()
    hosts = len(set(ring.allgather_object(socket.gethostname())))
    sys.stdout.write(f"rank {ring.rank()} of {ring.size()} on {hosts} hosts: all is well\n")
    dist.destroy_process_group()
    ring.shutdown()


if __name__ == "__main__":
    main()
