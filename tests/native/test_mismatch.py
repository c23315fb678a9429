"""Ranks that call different things: one error on all of them, with a table of who called what; the group lives on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from native.ranks import LAUNCHERS, Seat, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveMismatch

Call = Callable[[Communicator], object]


def tensor(ring: Communicator, shape: tuple[int, ...] = (2, 3), dtype: DType = DType.FLOAT32) -> Tensor:
    """Ones."""
    return Tensor.of(ring, np.ones(shape), dtype)


def allreduce(shape: tuple[int, ...] = (2, 3), dtype: DType = DType.FLOAT32, **options: object) -> Call:
    """A call of allreduce on ones."""

    def call(ring: Communicator) -> object:
        own = tensor(ring, shape, dtype).buffer
        return ring.allreduce([own], [own], **options)  # type: ignore[arg-type]

    return call


def fused(*shapes: tuple[int, ...]) -> Call:
    """A call of allreduce on several tensors."""

    def call(ring: Communicator) -> object:
        own = [tensor(ring, shape).buffer for shape in shapes]
        return ring.allreduce(own, own)

    return call


def broadcast(root: int) -> Call:
    """A call of broadcast."""
    return lambda ring: ring.broadcast(tensor(ring).buffer, tensor(ring).buffer, root)


# What differs, what rank 0 calls, what the others call, and the line that each of them gets in the table.
CASES: dict[str, tuple[str, Call, Call, str, str]] = {
    "kind": ("operation", allreduce(name="a"), lambda ring: ring.barrier(name="b"),
             "allreduce sum 'a' float32 [2, 3]", "barrier 'b'"),
    "shape": ("shape", allreduce((2, 3)), allreduce((3, 2)),
              "allreduce sum float32 [2, 3]", "allreduce sum float32 [3, 2]"),
    "dimensions": ("shape", allreduce((6,)), allreduce((6, 1)),
                   "allreduce sum float32 [6]", "allreduce sum float32 [6, 1]"),
    "large shape": ("shape", allreduce((100_000,)), allreduce((100_001,)),
                    "allreduce sum float32 [100000]", "allreduce sum float32 [100001]"),
    "dtype": ("dtype", allreduce(), allreduce(dtype=DType.BFLOAT16),
              "allreduce sum float32 [2, 3]", "allreduce sum bfloat16 [2, 3]"),
    "reduction": ("reduction", allreduce(op=ReduceOp.MIN), allreduce(op=ReduceOp.AVERAGE),
                  "allreduce min float32 [2, 3]", "allreduce average float32 [2, 3]"),
    "scale": ("scale factor", allreduce(prescale=0.5), allreduce(prescale=0.25),
              "allreduce sum float32 [2, 3] prescale 0.5", "allreduce sum float32 [2, 3] prescale 0.25"),
    "root": ("root rank", broadcast(0), broadcast(1),
             "broadcast float32 [2, 3] from rank 0", "broadcast float32 [2, 3] from rank 1"),
    "tensors": ("number of tensors", fused((1,), (2,)), fused((1,), (1,), (1,)),
                "allreduce sum float32 2 tensors, 3 elements", "allreduce sum float32 3 tensors, 3 elements"),
    "layout": ("shape", fused((1,), (2,)), fused((2,), (1,)),
               "allreduce sum float32 2 tensors, 3 elements", "allreduce sum float32 2 tensors, 3 elements"),
    "gathered": ("shape beyond the first dimension",
                 lambda ring: ring.allgather(tensor(ring, (2, 3)).buffer),
                 lambda ring: ring.allgather(tensor(ring, (2, 4)).buffer),
                 "allgather float32 [2, 3]", "allgather float32 [2, 4]"),
    "scattered": ("shape",
                  lambda ring: ring.reducescatter(tensor(ring, (6,)).buffer, tensor(ring, (2,)).buffer),
                  lambda ring: ring.reducescatter(tensor(ring, (3,)).buffer, tensor(ring, (1,)).buffer),
                  "reducescatter sum float32 [6]", "reducescatter sum float32 [3]"),
    "exchanged": ("dtype",
                  lambda ring: ring.alltoall(tensor(ring, (3,)).buffer, [1] * 3),
                  lambda ring: ring.alltoall(tensor(ring, (3,), DType.INT8).buffer, [1] * 3),
                  "alltoall float32 [3]", "alltoall int8 [3]"),
    "group": ("ranks of the new group", lambda ring: ring.group([0, 1]), lambda ring: ring.group([1, 0]),
              "group of 2 ranks", "group of 2 ranks"),
    "name": ("name", allreduce(name="first"), allreduce(name="second"),
             "allreduce sum 'first' float32 [2, 3]", "allreduce sum 'second' float32 [2, 3]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_sees_the_table(launcher: str, case: str) -> None:
    """The message names what differs and lists every rank's call; afterwards the group works, in the same epoch."""
    what, first, others, first_line, other_line = CASES[case]

    def body(seat: Seat) -> None:
        ring = seat.open()
        for _ in range(2):
            with pytest.raises(CollectiveMismatch) as caught:
                (first if ring.rank == 0 else others)(ring)
            text = str(caught.value)
            assert f"ranks do not agree on the {what} at sequence" in text
            lines = [line.partition(", shapes ")[0] for line in text.splitlines()]
            assert lines[1:4] == [f"  rank 0: {first_line}", f"  rank 1: {other_line}", f"  rank 2: {other_line}"]
            assert lines[0].startswith(f"rank {ring.rank}: ")
            own = tensor(ring)
            ring.allreduce([own.buffer], [own.buffer])
            assert set(own.values.ravel().tolist()) == {3.0}

    LAUNCHERS[launcher](3, body)


def test_a_queued_mismatch_fails_its_own_handle() -> None:
    """Operations before and after it in the queue complete."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        tensors = [tensor(ring), tensor(ring, (5,) if ring.rank else (4,)), tensor(ring)]
        before, wrong, after = (ring.allreduce([t.buffer], [t.buffer], blocking=False) for t in tensors)
        before.wait()
        with pytest.raises(CollectiveMismatch, match="do not agree on the shape"):
            wrong.wait()
        after.wait()
        assert set(tensors[2].values.ravel().tolist()) == {2.0}

    as_threads(2, body)


def test_one_name_may_be_missing() -> None:
    """A rank that gives no name agrees with any."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        allreduce(name="" if ring.rank else "grad")(ring)

    as_threads(2, body)


@pytest.mark.parametrize("name", ["é" * 60, "x" + "é" * 60, "n" * 500])
def test_names_are_cut_where_a_character_ends(name: str) -> None:
    """Names travel in a header of fixed size; what is left of them is text in errors and in snapshots."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        with pytest.raises(CollectiveMismatch, match=name[:30]):
            allreduce((2,) if ring.rank else (3,), name=name)(ring)
        kept, hashed = ring.snapshot()[0]["name"].rsplit("~", 1)
        assert name.startswith(kept)
        assert len(kept) >= 30
        assert int(hashed, 16) >= 0

    as_threads(2, body)


@pytest.mark.parametrize("name", ["n" * 500, "grad\0"])
def test_names_that_are_cut_are_compared_whole(name: str) -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        with pytest.raises(CollectiveMismatch, match="do not agree on the name"):
            allreduce(name=f"{name}{ring.rank}")(ring)
        allreduce(name=name)(ring)

    as_threads(2, body)


def test_a_difference_within_a_group_of_tensors_is_seen_in_the_table() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open()
        tensors = [tensor(ring, shape).buffer for shape in ([(2,), (4,)] if ring.rank else [(4,), (2,)])]
        with pytest.raises(CollectiveMismatch) as caught:
            ring.allreduce(tensors, tensors)
        rows = [line.partition("float32")[2] for line in str(caught.value).splitlines()[1:3]]
        assert rows[0] != rows[1]
        own = tensor(ring)
        ring.allreduce([own.buffer], [own.buffer], prescale=math.nan)

    as_threads(2, body)


def test_arguments_that_cannot_be_right() -> None:
    """ValueError on the rank that passed them, before anything is sent: the others need not know."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        own = tensor(ring, (4,))
        with pytest.raises(ValueError, match="splits must be one per rank and add up to the tensor's 4 elements"):
            ring.alltoall(own.buffer, [1, 2])
        with pytest.raises(ValueError, match="splits must be one per rank"):
            ring.alltoall(own.buffer, [4])
        with pytest.raises(ValueError, match="a split is negative"):
            ring.alltoall(own.buffer, [5, -1])
        with pytest.raises(ValueError, match="root 2 is not in this group of 2"):
            ring.broadcast(own.buffer, own.buffer, 2)
        with pytest.raises(ValueError, match="at most 8 travel"):
            allreduce((1,) * 9)(ring)
        scalar = tensor(ring, ())
        with pytest.raises(ValueError, match="has no rows to scatter"):
            ring.reducescatter(scalar.buffer, scalar.buffer)
        ring.barrier()
        ring.close()
        with pytest.raises(ValueError, match=r"rank .: barrier: this communicator is closed"):
            ring.barrier()

    as_threads(2, body)


@pytest.mark.parametrize("number", [-1, 10, 1 << 20])
def test_a_number_that_is_no_dtype_or_reduction(number: int) -> None:
    """ValueError that names the argument, before the core looks anything up by it."""

    def body(seat: Seat) -> None:
        native = seat.open()._native
        piece = (0, 0, 0)
        calls: dict[str, list[Callable[[], object]]] = {
            "dtype": [
                lambda: native.allreduce(0, 0, (0,), number, 0, 1.0, 1.0, "", 0.0),
                lambda: native.reduce(True, [piece], [0], 0, number, 0, 1.0, 1.0, "", True, 0.0),
                lambda: native.allgather(piece, [0], number, "", True, 0.0),
                lambda: native.alltoall(piece, [0], [0], number, "", True, 0.0),
                lambda: native.broadcast(piece, [0], 0, number, "", True, 0.0),
            ],
            "op": [
                lambda: native.allreduce(0, 0, (0,), 0, number, 1.0, 1.0, "", 0.0),
                lambda: native.reduce(True, [piece], [0], 0, 0, number, 1.0, 1.0, "", True, 0.0),
                lambda: native.step(piece, number, core().Update(), 0, 0, 0, "", 0.0),
            ],
            "rule": [lambda: setattr(core().Update(), "rule", number)],
        }
        most = {"dtype": 9, "op": 5, "rule": 1}
        for name, wrong in calls.items():
            for call in wrong:
                with pytest.raises(ValueError, match=rf"{name} must be between 0 and {most[name]}, got {number}"):
                    call()

    as_threads(1, body)
