"""Opening and closing again and again: descriptors, threads and memory stay where they are."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from native.calls import ASYNCHRONOUS
from native.ranks import Seat, as_processes
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, OutOfRingMemoryError

WARM = 40
"""Rounds after which a process has what it needs."""

SLACK = 8 << 20
"""Bytes by which a heap may grow without that being a leak: it levels off, and each kind of round moves more."""


def usage(seat: Seat) -> dict[str, int]:
    """What this process holds, once the other ranks have let go of what it made for all."""
    for rank in range(seat.size):
        seat.ring_memory.dead(rank)  # opens the one descriptor by which it watches that rank, if it has not yet
    deadline = time.monotonic() + 30
    while True:
        gc.collect()
        seat.ring_memory.allocate(1)  # when a rank allocates, it takes back what no other rank uses any more
        if seat.ring_memory.allocated == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "ring memory": seat.ring_memory.allocated,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "heap": int(status["RssAnon"].split()[0]) * 1024,
    }


def tensors_of_all_kinds(ring: Communicator) -> None:
    """Every collective, blocking and queued."""
    for call in ASYNCHRONOUS.values():
        call(ring, True)
        call(ring, False).wait()


def reopen(seat: Seat, generation: int) -> None:
    """A generation with a group and every collective, left in good order."""
    ring = seat.open(generation)
    group = ring.group([1, 0])
    assert group is not None
    if generation % 20 == 0:
        tensors_of_all_kinds(ring)
    group.barrier(blocking=False).wait()


def abort(seat: Seat, generation: int) -> None:
    """A generation that is aborted while the others open it, have operations under way or make a group."""

    def meet() -> None:
        ring = seat.open(generation)
        if seat.rank == 0:
            ring.abort("on purpose")
        if generation % 3 == 0:
            ring.group([0, 1])
        elif generation % 3 == 1:
            ASYNCHRONOUS["allreduce staged"](ring, False).wait()
        while True:
            ring.barrier()

    with pytest.raises(CollectiveAborted):
        meet()


def disagree(seat: Seat, generation: int) -> None:
    """Groups and tensors that do not match."""
    ring = seat.open(generation)
    with pytest.raises(CollectiveMismatch):
        ring.group([0, 1] if seat.rank else [1, 0])
    tensor = Tensor.of(ring, np.ones(5 + seat.rank), DType.FLOAT32, ring=True)
    with pytest.raises(CollectiveMismatch):
        ring.allreduce([tensor.buffer], [tensor.buffer])


def forget(seat: Seat, generation: int) -> None:
    """Handles that nobody waits for, results that nobody looks at."""
    ring = seat.open(generation)
    for _ in range(5):
        ASYNCHRONOUS["allgather"](ring, False)
        ASYNCHRONOUS["allreduce in ring memory"](ring, False)
    ring.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "turns"), [(reopen, 200), (abort, 60), (disagree, 60), (forget, 30)])
def test_generations_leave_nothing_behind(turn: Callable[[Seat, int], None], turns: int) -> None:
    """However a generation ends, the process is afterwards what it was before."""

    def body(seat: Seat) -> list[dict[str, int]]:
        measured = []
        for generation in range(1, WARM + turns + 1):
            turn(seat, generation)
            seat.leave(None)
            if generation in (WARM, WARM + turns):
                measured.append(usage(seat))
        return measured

    for before, after in as_processes(2, body):
        assert before.pop("heap") + SLACK > after.pop("heap")
        assert before == after
        assert after["ring memory"] == 0


def test_groups_leave_nothing_behind() -> None:
    """Groups made and closed within one generation."""

    def body(seat: Seat) -> list[int]:
        ring = seat.open()
        measured = []
        for _ in range(100):
            for ranks in ([0, 1, 2], [2, 0]):
                group = ring.group(ranks)
                if group is not None:
                    group.barrier()
                    group.close()
                del group
            ring.barrier()  # now everybody has closed its part
            seat.ring_memory.allocate(1)
            measured.append(seat.ring_memory.allocated)
        return measured

    for measured in as_processes(3, body):
        assert len(set(measured)) == 1


def test_ring_memory_is_given_back() -> None:
    """Blocks are reused, freed with their last view, and their pages go back to the machine."""
    ring_memory = core.RingMemory.create(0, 1, 64 << 20)

    def pages() -> int:
        return os.stat(f"/proc/self/fd/{ring_memory.fd}").st_blocks * 512

    least = pages()
    for _ in range(200):
        first, second = ring_memory.allocate(3 << 20), ring_memory.allocate(5 << 20)
        view = np.frombuffer(first, np.uint8)
        assert ring_memory.allocated == 8 << 20
        del first
        assert ring_memory.allocated == 8 << 20
        del second, view
        assert ring_memory.allocated == 0
    assert pages() <= least + (12 << 20)
    ring_memory.trim()
    assert pages() == least
    whole = ring_memory.allocate(64 << 20)
    with pytest.raises(OutOfRingMemoryError, match=r"has no such piece left"):
        ring_memory.allocate(1)
    del whole
    with pytest.raises(OutOfRingMemoryError, match="local rank 0 needs"):
        ring_memory.allocate(1 << 50)
