"""Small allreduces of tensors: the short way does what the ordinary one does, or leaves it to that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from native.ranks import LAUNCHERS, Seat, as_processes, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout
from ring_notebook.torch.tensors import buffer_of, reader

READER = reader()
pytestmark = pytest.mark.skipif(READER is None, reason="this torch has no C functions of DLPack")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)


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
    """Reduce by the short way; whether it took it."""
    assert READER is not None
    target = tensor if output is None else output
    return ring.allreduce_tensor(READER, tensor, target, op, prescale, postscale, name)


def ordinary(ring: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, **options: float) -> torch.Tensor:
    """A new tensor, reduced by the way of all other operations."""
    output = torch.empty_like(tensor)
    ring.allreduce([buffer_of(tensor)], [buffer_of(output)], op=op, **options)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("launcher", ["threads", "processes"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_ways_give_the_same_bits(launcher: str, size: int) -> None:
    def body(seat: Seat) -> None:
        ring = seat.open(inline_bytes=4096)
        for dtype in DTYPES:
            for count in (0, 1, 3, 500 // dtype.itemsize * 8 + 1):
                values = torch.arange(count).add(seat.rank).remainder(3).to(dtype)
                for op in set(ReduceOp) - {ReduceOp.ADASUM}:
                    wanted = ordinary(ring, values, op, prescale=2.0, postscale=0.5)
                    found = torch.empty_like(values)
                    assert small(ring, values, op, output=found, prescale=2.0, postscale=0.5) == (
                        count * dtype.itemsize <= 4096
                    )
                    if count * dtype.itemsize <= 4096:
                        assert torch.equal(found, wanted), (dtype, op, count)

    LAUNCHERS[launcher](size, body)


def test_the_way_is_chosen_by_each_rank_alone() -> None:
    """Ranks that go the short way and ranks that go the other meet, in whatever mix, with a name or without."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        for turn in range(300):
            tensor = torch.full((2, 3), float(turn + seat.rank))
            name = "same" if turn % 3 else ""
            if (turn + seat.rank) % 3:
                assert small(ring, tensor, name=name)
            else:
                ring.allreduce([buffer_of(tensor)], [buffer_of(tensor)], name="" if turn % 2 else name)
            assert tensor.tolist() == [[3.0 * turn + 3] * 3] * 2

    as_threads(3, body)


def test_a_late_rank_is_waited_for() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        for turn in range(6):
            if turn % 3 == seat.rank:
                time.sleep(0.02)
            tensor = torch.ones(4)
            assert small(ring, tensor)
            assert tensor.tolist() == [3.0] * 4

    as_threads(3, body)


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


def test_a_joined_rank_adds_nothing() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        if seat.rank:
            tensor = torch.ones(3)
            assert small(ring, tensor, ReduceOp.AVERAGE)
            assert tensor.tolist() == pytest.approx([2 / 3] * 3)
        assert ring.join().last_rank() >= 0

    as_threads(3, body)


def test_what_is_queued_before_it_comes_first() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        first = Tensor.of(ring, np.ones(50_000), DType.FLOAT32)
        work = ring.allreduce([first.buffer], [first.buffer], blocking=False)
        tensor = torch.ones(2)
        while not small(ring, tensor):
            work.wait()
        assert tensor.tolist() == [2.0] * 2

    as_threads(2, body)


def test_it_ends_with_the_epoch() -> None:
    """An abort, a rank that leaves, a deadline: each reaches a rank that waits, and closes the short way."""

    def body(seat: Seat) -> None:
        for epoch, (error, said) in enumerate(
            [(CollectiveAborted, "the reason"), (CollectiveAborted, "has left"), (CollectiveTimeout, "timed out")], 1
        ):
            ring = seat.open(epoch)
            if seat.rank == 0:
                ring.limit_time(0.1 if error is CollectiveTimeout else 30.0)
                with pytest.raises(error, match=said):
                    small(ring, torch.ones(2), name="alone")
                if error is CollectiveTimeout or "reason" in said:
                    assert not small(ring, torch.ones(2))
            else:
                time.sleep(0.05)
                if said == "the reason":
                    ring.abort("the reason")
                elif error is CollectiveTimeout:
                    time.sleep(0.3)
            ring.close()

    as_threads(2, body)


def test_it_is_interrupted() -> None:
    def body(seat: Seat) -> str:
        ring = seat.open()
        if seat.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                small(ring, torch.ones(2))
        else:
            while not ring.aborted:
                time.sleep(0.01)
            with pytest.raises(CollectiveAborted, match="rank 0 was interrupted"):
                ring.barrier()
        return "ended"

    assert as_processes(2, body) == ["ended"] * 2


def test_others_run_while_it_waits() -> None:
    """The wait releases the interpreter: a thread of the same process lets the others come."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        if seat.rank == 0:
            assert small(ring, torch.ones(1))
        else:
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            assert small(ring, torch.ones(1))

    as_threads(2, body)


def test_a_recording_shows_it() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        ring.record()
        tensor = torch.ones(2)
        assert not small(ring, tensor)
        ordinary(ring, tensor)
        assert {event[3] for event in ring.recorded()} == {"allreduce"}
        before = ring.seconds_spent()
        assert small(ring, tensor)
        assert ring.seconds_spent() > before

    as_threads(2, body)


def test_tensors_that_it_leaves_alone() -> None:
    """What memory does not say, or only in part: all of them read as None."""
    assert READER is not None

    class Mine(torch.Tensor):
        pass

    plain = torch.arange(6.0)
    strange = {
        "negative": torch._neg_view(plain),
        "transposed": plain.reshape(2, 3).t(),
        "expanded": plain[:1].expand(6),
        "a class of its own": plain.as_subclass(Mine),
        "sparse": plain.to_sparse(),
        "without memory": torch.empty(3, device="meta"),
        "complex": plain + 1j,
        "uint16": plain.to(torch.uint16),
        "float8": plain.to(torch.float8_e4m3fn),
        "no tensor": [1.0],
    }
    assert {name: READER.read(tensor) for name, tensor in strange.items()} == dict.fromkeys(strange)


def test_tensors_that_it_reads() -> None:
    assert READER is not None
    for dtype in DTYPES:
        tensor = torch.zeros(2, 1, 3, dtype=dtype)[1:]
        address, shape, number = READER.read(tensor) or (0, (), -1)
        assert (address, shape, DType(number).itemsize) == (tensor.data_ptr(), (1, 1, 3), dtype.itemsize)
        assert number == buffer_of(tensor).dtype
    leaf = torch.nn.Parameter(torch.ones(()))
    assert READER.read(leaf) == (leaf.data_ptr(), (), DType.FLOAT32)
    assert READER.read(torch.empty(0, 4)) == (0, (0, 4), DType.FLOAT32)


def test_a_framework_without_such_functions() -> None:
    with pytest.raises(ValueError, match="cannot be read by DLPack's C functions"):
        core().TensorReader((np.ndarray,), len)
