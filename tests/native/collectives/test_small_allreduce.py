"""Small allreduces of tensors: the short way does what the ordinary one does, or leaves it to that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from harness.waiting import until
from native.bindings.test_tensor_reader import DTYPES, READER
from native.ranks import Seat, as_processes, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout
from ring_notebook.torch.tensors import buffer_of

if TYPE_CHECKING:
    from ring_notebook import _core

pytestmark = pytest.mark.skipif(READER is None, reason="this torch has no C functions of DLPack")


def small(
    ring: Communicator,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    output: torch.Tensor | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    name: str = "",
) -> bool:
    """Reduce by the call that takes the short way where it can; whether the reader knew the tensor."""
    assert READER is not None
    target = tensor if output is None else output
    return ring.allreduce_tensors(READER, tensor, target, op, prescale, postscale, name)


def ordinary(ring: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: float) -> torch.Tensor:
    """A new tensor, reduced by the way of all other operations."""
    output = torch.empty_like(tensor)
    ring.allreduce([buffer_of(tensor)], [buffer_of(output)], op=op, **options)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("launcher", ["threads", "processes"])
@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_both_ways_give_the_same_bits(seat: Seat, launcher: str, size: int) -> None:
    ring = seat.open(inline_bytes=4096)
    for dtype in DTYPES:
        for count in (0, 1, 3, 500 // dtype.itemsize * 8 + 1):
            values = torch.arange(count).add(seat.rank).remainder(3).to(dtype)
            for op in set(ReduceOp) - {ReduceOp.ADASUM}:
                wanted = ordinary(ring, values, op, prescale=2.0, postscale=0.5)
                found = torch.empty_like(values)
                assert small(ring, values, op, output=found, prescale=2.0, postscale=0.5)
                assert torch.equal(found, wanted), (dtype, op, count)


@on_ranks(3)
def test_the_way_is_chosen_by_each_rank_alone(seat: Seat) -> None:
    """Ranks that go the short way and ranks that go the other meet, in whatever mix, with a name or without."""
    ring = seat.open()
    for turn in range(300):
        tensor = torch.full((2, 3), float(turn + seat.rank))
        name = "same" if turn % 3 else ""
        if (turn + seat.rank) % 3:
            assert small(ring, tensor, name=name)
        else:
            ring.allreduce([buffer_of(tensor)], [buffer_of(tensor)], name="" if turn % 2 else name)
        assert tensor.tolist() == [[3.0 * turn + 3] * 3] * 2


@on_ranks(3)
def test_a_late_rank_is_waited_for(seat: Seat) -> None:
    ring = seat.open()
    for turn in range(6):
        if turn % 3 == seat.rank:
            time.sleep(0.02)
        tensor = torch.ones(4)
        assert small(ring, tensor)
        assert tensor.tolist() == [3.0] * 4


Change = Callable[[Communicator, torch.Tensor], object]
MISMATCHES: dict[str, tuple[Change, str]] = {
    "shape": (lambda ring, t: small(ring, t.reshape(3, 2)), "same shape on every rank"),
    "count": (lambda ring, t: small(ring, t[:1]), "same shape on every rank"),
    "dtype": (lambda ring, t: small(ring, t.double()), "same dtype on every rank"),
    "op": (lambda ring, t: small(ring, t, ReduceOp.MAX), "same reduction on every rank"),
    "scale": (lambda ring, t: small(ring, t, prescale=0.5), "same scale factors on every rank"),
    "name": (lambda ring, t: small(ring, t, name="other"), "passed the name 'other'"),
    "operation": (lambda ring, t: ring.barrier(), "called barrier"),
    "size": (
        lambda ring, t: ring.allreduce([buffer_of(torch.ones(9000))], [buffer_of(torch.ones(9000))]),
        "same shape on every rank",
    ),
}


@pytest.mark.parametrize("difference", MISMATCHES)
def test_a_mismatch_is_told_and_the_group_lives_on(difference: str) -> None:
    call, said = MISMATCHES[difference]

    def body(seat: Seat) -> None:
        ring = seat.open()
        for late in (None, 0, 1):
            tensor = torch.ones(2, 3)
            if seat.rank == late:
                time.sleep(0.01)
            with pytest.raises(CollectiveMismatch, match=said if seat.rank == 0 else "on every rank|the name 'own'"):
                small(ring, tensor, name="own") if seat.rank == 0 else call(ring, tensor)
            assert small(ring, tensor)
            assert tensor.tolist() == [[2.0] * 3] * 2

    as_threads(2, body)


@on_ranks(3)
def test_a_joined_rank_adds_nothing(seat: Seat) -> None:
    ring = seat.open()
    if seat.rank:
        tensor = torch.ones(3)
        assert small(ring, tensor, ReduceOp.AVERAGE)
        assert tensor.tolist() == pytest.approx([2 / 3] * 3)
    assert ring.join().last_rank() >= 0


@on_ranks(2)
def test_what_is_queued_before_it_comes_first(seat: Seat) -> None:
    ring = seat.open()
    first = Tensor.of(ring, np.ones(50_000), DType.FLOAT32)
    work = ring.allreduce([first.buffer], [first.buffer], blocking=False)
    tensor = torch.ones(2)
    assert small(ring, tensor)
    assert work.done()
    assert tensor.tolist() == [2.0] * 2


@on_ranks(2)
def test_it_ends_with_the_generation(seat: Seat) -> None:
    """An abort, a rank that leaves, a deadline: each reaches a rank that waits, and one that calls later."""
    for generation, (error, said) in enumerate(
        [(CollectiveAborted, "the reason"), (CollectiveAborted, "has left"), (CollectiveTimeout, "timed out")], 1
    ):
        ring = seat.open(generation)
        if seat.rank == 0:
            ring.limit_time(0.1 if error is CollectiveTimeout else 30.0)
            with pytest.raises(error, match=said):
                small(ring, torch.ones(2), name="alone")
            with pytest.raises(CollectiveAborted):
                small(ring, torch.ones(2))
        else:
            time.sleep(0.05)
            if said == "the reason":
                ring.abort("the reason")
            elif error is CollectiveTimeout:
                while not ring.aborted:
                    time.sleep(0.01)
        ring.close()


@on_ranks(2, as_processes, gives=["ended"] * 2)
def test_it_is_interrupted(seat: Seat) -> str:
    ring = seat.open()
    if seat.rank == 0:
        while not ring.aborted:  # on a busy machine the signal may arrive before the wait begins
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start() or small(ring, torch.ones(2))
    else:
        while not ring.aborted:
            time.sleep(0.01)
        with pytest.raises(CollectiveAborted, match="rank 0 was interrupted"):
            ring.barrier()
    return "ended"


@on_ranks(2)
def test_others_run_while_it_waits(seat: Seat) -> None:
    """The wait releases the interpreter: a thread of the same process lets the others come."""
    ring = seat.open()
    if seat.rank == 0:
        assert small(ring, torch.ones(1))
    else:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        assert small(ring, torch.ones(1))


def start(ring: Communicator, tensors: object, op: ReduceOp = ReduceOp.SUM) -> _core.TensorWork:
    """Begin by the short way, which takes it."""
    assert READER is not None
    work = ring.start_tensors(READER, tensors, op, 1.0, 1.0, "")
    assert work is not None
    return work


@pytest.mark.parametrize("launcher", ["threads", "processes"])
@on_ranks(3)
def test_one_that_is_started_is_reduced_when_it_is_waited_for(seat: Seat, launcher: str) -> None:
    ring = seat.open()
    for turn in range(200):
        tensor = torch.full((3,), float(seat.rank + turn))
        work = start(ring, tensor)
        if turn % 4 == seat.rank:
            while not work.done():
                pass
        work.wait()
        assert work.done()
        assert tensor.tolist() == [3.0 * turn + 3] * 3


@on_ranks(2)
def test_one_that_nobody_waits_for_is_reduced_all_the_same(seat: Seat) -> None:
    """The progress thread does it, also where a rank has long computed since, and the next one after it."""
    ring = seat.open()
    for late in (0, 1):
        tensors = [torch.ones(2), torch.ones(2)]
        if seat.rank == late:
            time.sleep(0.05)
        works = [start(ring, tensors[0]), None]
        ring.allreduce([buffer_of(tensors[1])], [buffer_of(tensors[1])], blocking=False)
        del works
        until(lambda both=tensors: both[0][0] == both[1][0] == 2, why=ring.snapshot)
        ring.barrier()


@on_ranks(2)
def test_the_others_see_when_it_has_completed(seat: Seat) -> None:
    """A rank that has started one and computes is shown as idle soon, not as one that waits."""
    ring = seat.open()
    for _ in range(3):
        work = start(ring, torch.ones(2))
        until(lambda: all(entry["state"] == "idle" for entry in ring.snapshot()), why=ring.snapshot)
        time.sleep(0.03)  # the progress thread sleeps by now
        work.wait()


@on_ranks(2)
def test_one_that_is_started_ends_with_the_generation(seat: Seat) -> None:
    for generation, waits in enumerate([True, False], 1):
        ring = seat.open(generation)
        if seat.rank == 0:
            work = start(ring, torch.ones(2))
            while not waits and not ring.aborted:
                time.sleep(0.001)
            with pytest.raises(CollectiveAborted, match="the reason"):
                work.wait()
            assert work.done()
        else:
            time.sleep(0.05)
            ring.abort("the reason")
        ring.close()


@on_ranks(2)
def test_one_that_is_started_and_mismatched_is_told_so(seat: Seat) -> None:
    ring = seat.open()
    for late in (0, 1):
        if seat.rank == late:
            time.sleep(0.01)
        work = start(ring, torch.ones(2 + seat.rank))
        with pytest.raises(CollectiveMismatch, match="same shape"):
            work.wait()
    tensor = torch.ones(1)
    start(ring, tensor).wait()
    assert tensor.item() == 2


@on_ranks(3)
def test_a_list_is_one_operation(seat: Seat) -> None:
    """Both ways carry it out together; a list of other shapes, or in another order, is a mismatch."""
    ring = seat.open()
    for turn in range(30):
        tensors = [torch.full((2, 2), float(seat.rank)), torch.ones(()), torch.full((5,), 10.0 * seat.rank)]
        if (turn + seat.rank) % 3 == 0:
            buffers = [buffer_of(tensor) for tensor in tensors]
            ring.allreduce(buffers, buffers)
        elif (turn + seat.rank) % 3 == 1:
            assert READER is not None
            assert ring.allreduce_tensors(READER, tensors, tensors, ReduceOp.SUM, 1.0, 1.0, "")
        else:
            start(ring, tensors).wait()
        assert [tensor.flatten()[0].item() for tensor in tensors] == [3.0, 3.0, 30.0]
    other = [torch.ones(2), torch.ones(3)]
    with pytest.raises(CollectiveMismatch, match="same shape"):
        start(ring, other if seat.rank else other[::-1]).wait()
    one = [torch.ones(2)]
    (start(ring, one) if seat.rank else start(ring, one[0])).wait()
    assert one[0].tolist() == [3.0] * 2


@on_ranks(1)
def test_lists_that_take_the_ordinary_way(seat: Seat) -> None:
    ring = seat.open()
    plain, before = torch.ones(4), ring.counts()
    for tensors in ([], [plain, plain], [plain[:3], plain[2:]], [plain, plain.double()], [plain] * 100, [plain, 3]):
        assert READER is not None
        assert ring.start_tensors(READER, tensors, ReduceOp.SUM, 1.0, 1.0, "") is None
    assert ring.counts() == before


@on_ranks(2)
def test_a_recording_shows_it(seat: Seat) -> None:
    ring = seat.open()
    ring.record()
    tensor = torch.ones(2)
    assert small(ring, tensor)
    assert {event[3] for event in ring.recorded()} == {"allreduce"}
    before = ring.seconds_spent()
    assert small(ring, tensor)
    assert ring.seconds_spent() > before
