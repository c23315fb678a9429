"""Every collective against its definition, and the ways a generation ends; run by all ranks over several hosts."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ring_notebook.torch as ring
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.buffers import DType
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from native.collectives.test_allreduce import MEMORIES, REAL_OPS, check

# Below the size that travels with the agreement, above it, and over several segments with odd ends.
COUNTS = (1, 1000, 5000, 300_003)


def check_values() -> None:
    rank, size = ring.rank(), ring.size()
    torch.manual_seed(0)
    for count in COUNTS:
        for in_ring in (False, True):
            parts = [torch.randint(-50, 50, (count,)).float() for _ in range(size)]
            mine = ring.empty(count) if in_ring else torch.empty(count)
            mine.copy_(parts[rank])
            total = torch.stack(parts).sum(0)
            assert torch.equal(ring.allreduce(mine, op=ring.Sum), total)
            torch.testing.assert_close(ring.allreduce(mine, op=ring.Average, prescale_factor=0.5), total / size / 2)
            assert torch.equal(ring.allreduce(mine, op=ring.Max), torch.stack(parts).amax(0))
            assert torch.equal(ring.allreduce(mine.to(torch.int64), op=ring.Sum), total.long())
            assert torch.equal(ring.allgather(mine), torch.cat(parts))
            uneven = ring.allgather(mine[: rank + 1])
            assert torch.equal(uneven, torch.cat([part[: r + 1] for r, part in enumerate(parts)]))
            for root in range(size):
                assert torch.equal(ring.broadcast(mine, root), parts[root])
            rows = [count // size + (r < count % size) for r in range(size)]
            own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            assert torch.equal(ring.reducescatter(mine, op=ring.Sum), total[own])
            received, splits = ring.alltoall(mine, splits=torch.tensor(rows))
            assert torch.equal(received, torch.cat([part[own] for part in parts]))
            assert splits.tolist() == [rows[rank]] * size
            ring.allreduce_(mine, op=ring.Sum)
            assert torch.equal(mine, total)


def check_every_type() -> None:
    """The suite of one host: all types and reductions, ordinary and ring memory, against exact references."""
    communicator = world.current().communicator
    for dtype in DType:
        for op in REAL_OPS:
            for count in (7, 20_000, 300_003):
                check(communicator, dtype, (count,), op, memory="ring" if op % 2 else "ordinary", in_place=count == 7)
        for memory in MEMORIES:
            check(communicator, dtype, (1031, 67), memory=memory, prescale=0.5)


def check_wire() -> None:
    """What crosses the link as bfloat16 is the same on all ranks, and what is small crosses as it is."""
    os.environ["RING_WIRE"] = "bfloat16"
    config.cache_clear()
    ring.shutdown()
    ring.init()
    torch.manual_seed(ring.rank())
    summed = ring.allreduce(torch.rand(300_003) + 1, op=ring.Sum)
    assert torch.equal(summed, summed.bfloat16().float())
    for other in ring.allgather(summed[None]):
        assert torch.equal(other, summed)
    del os.environ["RING_WIRE"]
    config.cache_clear()
    ring.shutdown()
    ring.init()


def check_training() -> None:
    """Steps equal those of one process on all the data."""
    for build in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)):
        models, optimizers = [], []
        for alone in (True, False):
            torch.manual_seed(3)
            models.append(torch.nn.Sequential(torch.nn.Linear(31, 203), torch.nn.Tanh(), torch.nn.Linear(203, 1)))
            optimizer = build(models[-1].parameters())
            optimizers.append(optimizer if alone else ring.DistributedOptimizer(optimizer))
        for _ in range(5):
            x = torch.randn(4 * ring.size(), 31)
            own = x[ring.rank() :: ring.size()]
            for model, optimizer, data in zip(models, optimizers, (x, own), strict=True):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
        for single, ours in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours, single, rtol=1e-4, atol=1e-5)
            for other in ring.allgather(ours.detach()[None]):
                assert torch.equal(other, ours), "ranks have drifted apart"


def check_adasum() -> None:
    """Parallel vectors are averaged; four of them twice. At right angles they add up."""
    rank, size = ring.rank(), ring.size()
    if size in (2, 4):
        assert torch.equal(ring.allreduce(torch.full((50_000,), 3.0), op=ring.Adasum), torch.full((50_000,), 3.0))
        corner = torch.zeros(40_000)
        corner[rank] = 2.0
        assert torch.equal(ring.allreduce(corner, op=ring.Adasum)[:size], torch.full((size,), 2.0))


def check_groups() -> None:
    rank, size = ring.rank(), ring.size()
    for members in ([0, size - 1], list(range(size))[::-1], list(range(0, size, 2))):
        group = ring.add_process_set(members)
        if rank in members:
            summed = ring.allreduce(torch.full((100_000,), float(rank)), op=ring.Sum, process_set=group)
            assert summed[0] == sum(members)
        assert ring.remove_process_set(group)
    handles = [ring.allreduce_async(torch.full((n,), 1.0), op=ring.Sum) for n in (3, 90_000, 10)]
    assert all(ring.synchronize(handle)[0] == size for handle in handles)
    if rank == 0:
        ring.allreduce(torch.ones(50_000), op=ring.Sum)
    assert ring.join() == 0


def check_first_ranks() -> None:
    """The first rank of each host executes a block in a world of its own, the others when it has ended."""
    executed = []
    with ring.only(each_host=True):
        executed.append((ring.size(), ring.allreduce(torch.ones(3), op=ring.Sum).tolist()))
        time.sleep(0.2 * (ring.rank() == 0))
    assert executed == [(1, [1.0] * 3)] * (ring.local_rank() == 0)
    assert all(
        len(one) == (rank in world.current().first_ranks) for rank, one in enumerate(ring.allgather_object(executed))
    )


def check_names() -> None:
    """Forty names in an order of each rank's own, beside sums without one, one that does not match, then a join."""
    rank, size = ring.rank(), ring.size()
    before = world.current().communicator.named_counts()
    order = list(range(40))
    random.Random(rank).shuffle(order)
    handles: dict[int | str, Any] = {}
    for number in order:
        tensor = torch.full((10 ** (number % 6),), float(rank + number))
        handles[number] = ring.allreduce_async(tensor, op=ring.Sum, name=f"gradient {number}")
        if number % 10 == rank % 10:
            handles["rows"] = ring.allgather_async(torch.full((rank + 1,), rank), name="rows")
            handles["wrong"] = ring.broadcast_async(torch.zeros(3 + (rank == size - 1)), 0, name="wrong")
            break
    assert ring.allreduce(torch.ones(2), op=ring.Sum)[0] == size
    for number in order[len(handles) - 2 :]:
        tensor = torch.full((10 ** (number % 6),), float(rank + number))
        handles[number] = ring.allreduce_async(tensor, op=ring.Sum, name=f"gradient {number}")
    for number in range(40):
        expected = float(sum(range(size)) + number * size)
        assert torch.equal(ring.synchronize(handles[number]), torch.full((10 ** (number % 6),), expected))
    rows = [r for r in range(size) for _ in range(r + 1)]
    assert ring.synchronize(handles["rows"]).tolist() == rows
    if size > 1:
        with pytest.raises(CollectiveMismatch, match=rf"rank {size - 1}: broadcast 'wrong' float32 \[4\]"):
            ring.synchronize(handles["wrong"])
    counts = world.current().communicator.named_counts()
    assert counts["operations"] - before["operations"] < counts["names"] - before["names"] == 42
    own = ring.allreduce_async(torch.ones(3), op=ring.Sum, name=f"of rank {rank} alone")
    ring.join()
    assert ring.synchronize(own).tolist() == [1.0] * 3


def check_counts() -> None:
    """A small sum takes one message from each host to each other, with one header for all ranks of the host.

    From 13 hosts on each passes on what it has got, in as many messages as log2(hosts), rounded up.
    """
    before = ring.counts()
    ring.allreduce(torch.ones(1))
    did = ring.counts() - before
    others = ring.cross_size() - 1
    if others == 0:  # ranks of one host may act as hosts of their own
        return
    messages = others if others < 12 else others.bit_length()
    assert (did.operations, did.messages) == (1, messages if ring.local_rank() == 0 else 0), did
    assert did.bytes <= (310 * others if ring.local_rank() == 0 else 0)


def check_mismatch() -> None:
    for count in (4, 40_000):
        with pytest.raises(CollectiveMismatch, match=rf"rank {ring.size() - 1}: allreduce sum .* \[{count + 1}\]"):
            ring.allreduce(torch.ones(count + (ring.rank() == ring.size() - 1)), op=ring.Sum)
        assert ring.allreduce(torch.ones(2), op=ring.Sum)[0] == ring.size()


def check_end(end: Callable[[], None], words: str, operation: Callable[[], object]) -> None:
    """The last rank ends the generation while all others wait in ``operation``; then all open the next one."""
    if ring.rank() == ring.size() - 1:
        time.sleep(0.2)
        end()
    else:
        with pytest.raises(CollectiveAborted, match=words):
            operation()
    ring.shutdown()
    ring.init()
    assert ring.allreduce(torch.ones(5), op=ring.Sum)[0] == ring.size()


def main() -> None:
    ring.init()
    check_counts()  # before anything has a name: what named operations say to each other may come later
    check_values()
    if "over the link" in sys.argv:  # within one machine tests/native does it
        check_every_type()
    check_wire()
    check_training()
    check_adasum()
    check_groups()
    check_first_ranks()
    check_names()
    check_mismatch()
    for operation in (ring.barrier, lambda: ring.allreduce(torch.ones(100_000)), lambda: ring.allgather(torch.ones(3))):
        check_end(lambda: world.abort("rank 9 raised ValueError: bad"), "raised ValueError: bad", operation)
        check_end(ring.shutdown, "ha(s|ve) left", operation)
    hosts = len(set(world.current().hosts))
    os.write(1, f"rank {ring.rank()} of {ring.size()} on {hosts} hosts: all is well\n".encode())
    ring.shutdown()


if __name__ == "__main__":
    main()
