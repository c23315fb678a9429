"""Every wait ends: by an abort from any rank, a rank that leaves, a deadline or an interrupt, in every collective."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.programs import ran
from harness.waiting import until
from native.calls import CALLS, WAITS
from native.names import LATE, ends, total
from native.over_devices import also_on_devices
from native.ranks import Seat, as_processes, as_threads, on_ranks
from native.values import Tensor, produced
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, CollectiveTimeout


def begin(ring: Communicator, call: str, blocking: bool) -> Callable[[], object]:
    """What waits for the collective: the call itself, or its handle once it is queued."""
    return (lambda: CALLS[call](ring, True)) if blocking else CALLS[call](ring, False).wait


def when_all_wait(ring: Communicator, ranks: set[int]) -> None:
    """Return when just ``ranks`` wait in a collective of the test's own, past what prepares it."""

    def waiting() -> set[int]:
        return {
            entry["rank"]
            for entry in ring.snapshot()
            if entry["state"] == "waiting" and entry["name"] not in ("begin", "setup", "group")
        }

    until(lambda: waiting() == ranks, LATE, ring.snapshot)


@also_on_devices
@pytest.mark.parametrize("aborter", [0, 2])
@pytest.mark.parametrize(("call", "blocking"), WAITS)
@on_ranks(3)
def test_abort_while_others_wait(seat: Seat, call: str, blocking: bool, aborter: int) -> None:
    """The reason reaches all that wait and all that come later; the next generation starts clean."""
    ring = seat.open(1)
    if seat.rank == aborter:
        when_all_wait(ring, {0, 1, 2} - {aborter})
        ring.abort("the cell of rank X raised ValueError")
    else:
        ends(
            begin(ring, call, blocking),
            CollectiveAborted,
            f"rank {seat.rank}: .*(sequence 2).* stopped because the cell of rank X",
        )
    assert ring.aborted
    ends(
        ring.barrier,
        CollectiveAborted,
        r"barrier( \(sequence [1-9]\d*\))? stopped because the cell of rank X raised ValueError",
    )
    total(seat.open(2))


@pytest.mark.parametrize("blocking", [True, False])
def test_abort_reaches_a_group(blocking: bool) -> None:
    """A rank outside a group ends what waits inside it: groups belong to their generation."""

    waits = threading.Event()

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        group = ring.group([0, 1])
        if group is None:
            assert waits.wait(LATE)
            ring.abort("rank 2 is not well")
        elif seat.rank == 1:
            when_all_wait(ring, {0})
            waits.set()
        else:
            ends(begin(group, "barrier", blocking), CollectiveAborted, "rank 2 is not well")
        total(seat.open(2))

    as_threads(3, body)


@also_on_devices
@pytest.mark.parametrize("in_group", [True, False])
@pytest.mark.parametrize("call", CALLS)
@on_ranks(3)
def test_a_rank_that_leaves(seat: Seat, call: str, in_group: bool) -> None:
    """All that wait for it learn that it has left, in a group of the generation that it left too."""
    ring = seat.open(1)
    group = ring.group([2, 1, 0]) if in_group else ring
    assert group is not None
    if seat.rank == 1:
        when_all_wait(ring, {0, 2})
        ring.close()
        with pytest.raises(ValueError, match="communicator is closed"):
            group.barrier()
    else:
        ends(lambda: CALLS[call](group, True), CollectiveAborted, r"rank 1 has left \(its cell or script ended\)")
    total(seat.open(2))


@on_ranks(3)
def test_a_rank_that_leaves_in_good_order(seat: Seat) -> None:
    """Who closes after the last operation disturbs nobody who has yet to come out of it."""
    for generation in range(1, 100):
        ring = seat.open(generation)
        tensor = Tensor.of(ring, np.ones(20_000), DType.FLOAT32)
        ring.allreduce([tensor.buffer], [tensor.buffer])
        ring.close()
        seat.opened.clear()


@on_ranks(2)
def test_dropped_while_under_way(seat: Seat) -> None:
    """A communicator that is dropped with operations under way ends the generation; others are not left waiting."""
    ring = seat.open(1)
    if seat.rank == 0:
        ring.barrier(blocking=False)
        when_all_wait(ring, {0})
        seat.opened.clear()
        del ring
        gc.collect()
    else:
        time.sleep(0.1)
        ends(lambda: [ring.barrier() for _ in range(2)], CollectiveAborted, "rank 0 dropped a communicator")
    total(seat.open(2))


@also_on_devices
@pytest.mark.parametrize(("call", "blocking"), WAITS)
def test_deadline(call: str, blocking: bool, settings: Callable[..., None]) -> None:
    """Past RING_TIMEOUT the error names the missing rank; that one learns of it when it calls."""
    settings(timeout=0.4)

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        if seat.rank == 1:
            begun = time.monotonic()
            while not ring.aborted and time.monotonic() - begun < LATE:
                time.sleep(0.01)
            ends(ring.barrier, CollectiveAborted, "timed out: rank 1 has not called it")
        else:
            ends(
                begin(ring, call, blocking),
                CollectiveTimeout,
                r"timed out: rank 1 has not called it\. Call it on every rank",
            )
        seat.open(2)  # whose first barrier has a longer deadline

    as_threads(2, body)


def test_a_deadline_names_missing_ranks_by_number(settings: Callable[..., None]) -> None:
    """Whatever their order in the group."""
    settings(timeout=0.4)

    def body(seat: Seat) -> None:
        group = seat.open(1).group([2, 1, 0])
        assert group is not None
        if seat.rank == 0:
            ends(group.barrier, CollectiveTimeout, "timed out: ranks 1, 2 have not called it")
        while not group.aborted:
            time.sleep(0.01)

    as_threads(3, body)


@on_ranks(2)
def test_deadline_of_a_wait(seat: Seat) -> None:
    """``Work.wait(timeout)`` ends the operation, for all."""
    ring = seat.open(1)
    seat.meet()
    if seat.rank == 0:
        work = ring.barrier(name="late", blocking=False)
        ends(lambda: work.wait(0.2), CollectiveTimeout, "rank 0: barrier 'late' was not done after 0.2 s")
        ends(work.wait, CollectiveAborted, "was not done after 0.2 s")
    else:
        while not ring.aborted:
            time.sleep(0.01)
    total(seat.open(2))


@pytest.mark.parametrize("seconds", [math.inf, 1e300, 1e10])
def test_a_deadline_that_never_comes(seconds: float, settings: Callable[..., None]) -> None:
    """More nanoseconds than a clock counts are not a time that has passed."""
    settings(timeout=seconds)

    def body(seat: Seat) -> None:
        ring = seat.open(timeout=seconds)
        tensor = Tensor.of(ring, np.ones(3), DType.FLOAT32)
        if seat.rank == 1:
            time.sleep(0.2)  # the other looks at its deadlines meanwhile
        ring.allreduce([tensor.buffer], [tensor.buffer])
        if seat.rank == 1:
            time.sleep(0.2)
        ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False).wait(timeout=seconds)
        assert tensor.values.tolist() == [4.0] * 3

    as_threads(2, body)


@on_ranks(2)
def test_a_generation_that_does_not_begin(seat: Seat) -> None:
    """A rank that waits for others to open a generation gives up at the deadline, and can open the next with them."""
    if seat.rank == 0:
        ends(lambda: seat.open(5, timeout=0.2), CollectiveTimeout, "rank 1 has not called it")
    total(seat.open(6))
    if seat.rank == 1:
        ends(lambda: seat.open(5, timeout=0.2), CollectiveAborted, "a generation that rank 0 has already left")
        ends(lambda: seat.open(7, timeout=0.2), CollectiveTimeout, "rank 1 waited 0.2 s for rank 0")


@pytest.mark.parametrize("launcher", ["threads", "processes"])
@on_ranks(3)
def test_a_rank_that_gives_up_before_the_generation(seat: Seat, launcher: str) -> None:
    """One that is stopped while it opens a generation will never come; those who wait for it there learn that."""
    total(seat.open(1))
    if seat.rank == 1:
        # It waits for a leader that will not open this, as the leader of the others waits for it.
        ends(lambda: seat.open(2, ranks=[2, 1, 0], timeout=0.2), CollectiveTimeout, "rank 1 waited 0.2 s for rank 2")
    else:
        ends(lambda: seat.open(2), CollectiveAborted, "stopped before it joined this generation")
    total(seat.open(3))


@also_on_devices
@pytest.mark.parametrize(("call", "blocking"), WAITS)
@on_ranks(3, as_processes)
def test_interrupt(seat: Seat, call: str, blocking: bool) -> None:
    """A real SIGINT is a KeyboardInterrupt inside the collective; the others learn who was interrupted; all go on."""
    ring = seat.open(1)
    own = Tensor.of(ring, np.array([os.getpid()]), DType.INT64)
    pids = np.frombuffer(produced(ring.allgather(own.buffer, name="setup")), np.int64)
    seat.meet()  # what tries a device before its first operation waits too
    if seat.rank == 0:
        when_all_wait(ring, {1, 2})
        time.sleep(0 if blocking else 0.2)  # no snapshot shows that a queued operation is being waited for
        os.kill(int(pids[1]), signal.SIGINT)
        when_all_wait(ring, set())
        ends(ring.barrier, CollectiveAborted, "rank 1 was interrupted")
    elif seat.rank == 1:
        ends(lambda: begin(ring, call, blocking)(), KeyboardInterrupt, None)
    else:
        ends(begin(ring, call, blocking), CollectiveAborted, "stopped because rank 1 was interrupted (in|while)")
    total(seat.open(2))


def test_no_thread_for_queued_operations() -> None:
    """Where the machine gives no thread nothing is queued, and signals still come; later it may."""
    script = textwrap.dedent("""
        import resource, signal
        from pathlib import Path
        from ring_notebook.core.native import core

        ring_memory = core.RingMemory.create(0, 1, 1 << 20)
        ring = core.Communicator.open(ring_memory=ring_memory, ranks=[0], local=[0], index=0, generation=1)
        ring.barrier("", True, 0.0)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        # Room for what Python needs, and not for a stack.
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20), limits[1]))
        try:
            ring.barrier("", False, 0.0)
        except RuntimeError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        ring.barrier("", False, 0.0).wait(5.0)
        print("done")
        """)
    run = ran([sys.executable, "-c", script], check=True)
    said = run.stdout.splitlines()
    assert said[0].startswith("no thread can be started for queued operations"), run.stdout
    assert said[1:] == ["set()", "done"]


@on_ranks(1)
def test_no_thread_takes_signals_but_the_main_one(seat: Seat) -> None:
    """The progress thread leaves signals to Python; those of a crash of its own are not blocked, so it is told."""
    ring = seat.open()
    before = set(os.listdir("/proc/self/task"))
    ring.barrier(blocking=False).wait()
    (thread,) = set(os.listdir("/proc/self/task")) - before
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    for crash in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        assert not blocked >> (crash - 1) & 1
