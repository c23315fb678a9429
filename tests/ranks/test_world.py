"""init and shutdown, who is who, what is built in, and process sets."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.waiting import until
from ranks.joint_training import assert_same, joint_batches, make_model, momentum, plain_step, share
from ring_notebook.api import basics
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted


def test_who_is_who(hvd: ModuleType, size: int, rank: int) -> None:
    assert (hvd.size(), hvd.rank()) == (size, rank)
    assert (hvd.local_size(), hvd.local_rank()) == (size, rank)
    assert (hvd.cross_size(), hvd.cross_rank()) == (1, 0)
    assert hvd.is_homogeneous()


def test_what_is_built_in(hvd: ModuleType, size: int) -> None:
    assert hvd.mpi_built() is True
    assert hvd.mpi_enabled() is (size > 1)  # one rank is started without MPI
    assert hvd.mpi_threads_supported() is (size > 1)
    for absent in ("gloo_enabled", "gloo_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "nccl_built"):
        assert not getattr(hvd, absent)()


def test_nothing_works_before_init_and_all_of_it_after_fifty_times(hvd: ModuleType) -> None:
    for _ in range(50):
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for function in ("size", "rank", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"):
            with pytest.raises(ValueError, match="init"):
                getattr(hvd, function)()
        with pytest.raises(ValueError, match="init"):
            hvd.allreduce(torch.ones(1))
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="other tables of lines")
def test_a_failure_at_an_instruction_without_a_line(hvd: ModuleType) -> None:
    """As in what Python has compiled for itself, where an interrupt may come."""

    def fails() -> None:
        raise ValueError("boom\nin a line below")

    fails.__code__ = fails.__code__.replace(co_linetable=b"\xff" * len(fails.__code__.co_code))
    with pytest.raises(ValueError, match="boom") as raised:
        fails()
    world.fail(raised.value)
    with pytest.raises(CollectiveAborted, match="raised ValueError: boom in a line below"):
        hvd.barrier()
    hvd.shutdown()
    hvd.init()


@pytest.mark.slow
def test_everything_works_after_init_has_come_often(hvd: ModuleType, size: int, rank: int) -> None:
    """One training through many epochs, with objects, process sets, handles and joins in each."""
    batches = joint_batches(size, steps=50)
    model, reference = make_model(), make_model()
    optimizer, alone = hvd.DistributedOptimizer(momentum(model)), momentum(reference)
    evens = hvd.ProcessSet(range(0, size, 2))
    for step, batch in enumerate(batches):
        hvd.shutdown()
        hvd.init(process_sets=[evens])
        plain_step(reference, alone, batch)
        plain_step(model, optimizer, share(batch, rank))
        handle = hvd.alltoall_async(torch.full((size,), float(rank)), name="to all")
        assert hvd.broadcast_object({"step": step} if rank == 0 else None) == {"step": step}
        assert hvd.synchronize(handle).tolist() == list(range(size))
        if evens.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=evens).item() == evens.size()
        assert 0 <= hvd.join() < size
    assert_same(model, reference)
    hvd.check(model, optimizer)


def test_init_over_some_ranks(hvd: ModuleType, size: int, rank: int) -> None:
    hvd.shutdown()
    evens = [r for r in range(size) if r % 2 == 0]
    mine = evens if rank in evens else [r for r in range(size) if r % 2]
    hvd.init(mine)
    assert (hvd.size(), hvd.rank()) == (len(mine), mine.index(rank))
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == sum(mine)
    hvd.shutdown()
    if size > 1:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Split(rank % 2)
        hvd.init(comm)
        assert hvd.allgather(torch.tensor([rank])).tolist() == mine
        hvd.shutdown()
        comm.Free()
    hvd.init()


def test_init_within_a_run_is_for_the_ranks_of_the_run(hvd: ModuleType, size: int, rank: int) -> None:
    """As in a cell on fewer ranks than there are engines."""
    generation = hvd.broadcast_object(time.time_ns() // 1_000_000)  # as the kernel numbers them
    hvd.shutdown()
    fewer = max(1, size - 1)
    if rank < fewer:
        world.open_run("run", generation, range(fewer))
        for _ in range(3):
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == fewer
            assert world.current().run == "run"
            hvd.shutdown()
            hvd.init()
        world.close_run()
    world.open_run("next", generation + 1000, range(size))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    world.close_run()
    hvd.init()


def test_a_run_on_some_ranks_counts_them_from_zero(hvd: ModuleType, size: int, rank: int) -> None:
    """In any order, and `init` within it goes by the numbers of the run."""
    generation = hvd.broadcast_object(time.time_ns() // 1_000_000)
    hvd.shutdown()
    some = list(range(size - 1, -1, -2))  # every second rank, from the last
    if rank in some:
        world.open_run("run", generation, some)
        assert (hvd.rank(), hvd.size()) == (some.index(rank), len(some))
        assert hvd.allgather(torch.tensor([rank])).tolist() == some
        hvd.shutdown()
        hvd.init(list(range(len(some)))[::-1])
        assert hvd.allgather(torch.tensor([rank])).tolist() == some[::-1]
        hvd.shutdown()
        with pytest.raises(ValueError, match=f"between 0 and {len(some) - 1}"):
            hvd.init([len(some)])
        world.close_run()
    world.open_run("next", generation + 1000, range(size))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    world.close_run()
    hvd.init()


def test_global_process_set(hvd: ModuleType, size: int, rank: int) -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(size))
    assert (everyone.size(), everyone.rank(), everyone.included()) == (size, rank, True)
    assert hvd.remove_process_set(everyone) is False
    with pytest.raises(ValueError, match="already registered"):
        hvd.add_process_set(everyone)


def test_static_process_sets(hvd: ModuleType, size: int, rank: int) -> None:
    hvd.shutdown()
    evens, odds = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert evens.process_set_id is None
    hvd.init(process_sets=[evens, odds])
    assert (evens.process_set_id, odds.process_set_id) == (1, 2)
    mine = odds if rank % 2 else evens
    other = evens if rank % 2 else odds
    assert mine.included()
    assert not other.included()
    assert mine.rank() == rank // 2
    assert other.rank() == -1
    assert mine.size() == len(mine.ranks)
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item() == sum(mine.ranks)
    with pytest.raises(ValueError, match="is not in process set"):
        hvd.allreduce(torch.ones(1), process_set=other)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match="not registered"):
        mine.size()
    with pytest.raises(ValueError, match='"dynamic"'):
        hvd.init(process_sets="static")
    with pytest.raises(ValueError, match="already registered"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([]), hvd.ProcessSet([0])])
    assert basics._get_process_set_ids_and_ranks() == {0: list(range(size))}


def test_dynamic_process_sets(hvd: ModuleType, size: int, rank: int) -> None:
    first = hvd.add_process_set([size - 1, 0] if size > 1 else [0])
    assert first.ranks == sorted({0, size - 1})
    with pytest.raises(ValueError, match="already registered"):
        hvd.add_process_set(first.ranks)
    with pytest.raises(ValueError, match=f"within 0..{size - 1}"):
        hvd.add_process_set([0, size])
    with pytest.raises(ValueError, match="distinct"):
        hvd.ProcessSet([0, 0])
    second = hvd.add_process_set(hvd.ProcessSet(range(size - 1)))  # none at all at size 1
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    assert hvd.remove_process_set(first) is True
    assert hvd.remove_process_set(first) is False
    with pytest.raises(ValueError, match="not registered"):
        first.size()
    ranks = {0: list(range(size)), 2: second.ranks}
    assert basics._get_process_set_ids_and_ranks() == ranks
    third = hvd.add_process_set(first)
    assert third.process_set_id == 1
    assert basics._get_process_set_ids_and_ranks() == {**ranks, 1: third.ranks}
    hvd.remove_process_set(third)
    assert second.included() is (rank < size - 1)
    if second.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=second).tolist() == second.ranks


def test_process_set_of_an_mpi_communicator(hvd: ModuleType, size: int, rank: int) -> None:
    if size == 1:
        pytest.skip("one rank is started without MPI")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(MPI.UNDEFINED if rank == 1 else rank % 2)
    halves = hvd.add_process_set(hvd.ProcessSet(comm))
    mine = [] if rank == 1 else [r for r in range(size) if r % 2 == rank % 2 and r != 1]
    assert halves.ranks == mine
    if halves.included():
        assert hvd.allgather(torch.tensor([rank]), process_set=halves).tolist() == mine
    if comm:
        comm.Free()


def test_every_collective_in_a_process_set(hvd: ModuleType, size: int, rank: int) -> None:
    evens = hvd.add_process_set(range(0, size, 2))
    if evens.included():
        ranks = evens.ranks
        here = torch.tensor([float(rank)])
        assert hvd.allreduce(here, process_set=evens).item() == sum(ranks) / len(ranks)
        assert hvd.grouped_allreduce([here], op=hvd.Sum, process_set=evens)[0].item() == sum(ranks)
        assert hvd.broadcast(here, ranks[-1], process_set=evens).item() == ranks[-1]
        assert hvd.broadcast_object(rank, ranks[-1], process_set=evens) == ranks[-1]
        assert hvd.allgather_object(rank, process_set=evens) == ranks
        assert hvd.alltoall(here.repeat(len(ranks)), process_set=evens).tolist() == ranks
        assert hvd.reducescatter(here.repeat(len(ranks)), op=hvd.Sum, process_set=evens).tolist() == [sum(ranks)]
        sparse = here.to_sparse()
        assert hvd.sparse_allreduce_async(sparse, "s", hvd.Sum, evens)().to_dense().item() == sum(ranks)
        hvd.barrier(process_set=evens)
        if size > 1:
            with pytest.raises(ValueError, match="root_rank=1 is not in process set"):
                hvd.broadcast(here, 1, process_set=evens)
    hvd.barrier()


def names_in(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_timeline(hvd: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(8), name="seen")
    until(lambda: hvd.rank() or "allreduce seen" in names_in(path))  # the file of rank 0 can be read meanwhile
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(8), name="unseen")
    own: Any = json.loads((tmp_path / f"timeline.rank{hvd.rank()}.json").read_text())["traceEvents"]
    assert {event["pid"] for event in own} == {hvd.rank()}
    phases = {event["cat"] for event in own if event["name"] == "allreduce seen"}
    assert {"queued", "packing", "waiting", "moving"} <= phases
    assert not any("unseen" in event["name"] for event in own)
    assert path.exists() == (hvd.rank() == 0)
    if path.exists():
        merged: Any = json.loads(path.read_text())["traceEvents"]
        assert {event["pid"] for event in merged} == set(range(hvd.size()))
        waits = [event for event in merged if event["cat"] == "waiting" and event["name"] == "allreduce seen"]
        assert len({event["args"]["last to arrive"] for event in waits}) == 1  # all waited for the same rank
