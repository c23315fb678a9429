"""Ranks that call different things: one error on all of them, with a table of who called what; the group lives on."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from native.over_devices import also_on_devices
from native.ranks import LAUNCHERS, Seat, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.errors import CollectiveMismatch

Call = Callable[[Communicator], object]


def tensor(ring: Communicator, shape: tuple[int, ...] = (2, 3), dtype: DType = DType.FLOAT32) -> Tensor:
    """Ones."""
    return Tensor.of(ring, np.ones(shape), dtype)


def allreduce(
    shape: tuple[int, ...] = (2, 3),
    dtype: DType = DType.FLOAT32,
    device: Device | None = None,
    address: int = 0,
    **options: object,
) -> Call:
    """A call of allreduce on ones, or on a tensor that claims to be on ``device`` and at ``address``."""

    def call(ring: Communicator) -> object:
        own = tensor(ring, shape, dtype).buffer
        own.device, own.address = own.device if device is None else device, address or own.address
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


SAME_ORDER = "call the same operations in the same order on every rank"


def same(what: str) -> str:
    """What to do about most mismatches."""
    return f"call it with the same {what} on every rank"


# What rank 0 calls, what the others call, the line that each gets in the table, what rank 0 expects, what rank 1
# did instead, and what to do.
CASES: dict[str, tuple[Call, Call, str, str, str, str, str]] = {
    "kind": (allreduce(name="a"), lambda ring: ring.barrier(name="b"),
             "allreduce sum 'a' float32 [2, 3]", "barrier 'b'",
             "allreduce", "called barrier", SAME_ORDER),
    "shape": (allreduce((2, 3)), allreduce((3, 2)),
              "allreduce sum float32 [2, 3]", "allreduce sum float32 [3, 2]",
              "float32 [2, 3]", "sent float32 [3, 2]", same("shape")),
    "dimensions": (allreduce((6,)), allreduce((6, 1)),
                   "allreduce sum float32 [6]", "allreduce sum float32 [6, 1]",
                   "float32 [6]", "sent float32 [6, 1]", same("shape")),
    "large shape": (allreduce((100_000,)), allreduce((100_001,)),
                    "allreduce sum float32 [100000]", "allreduce sum float32 [100001]",
                    "float32 [100000]", "sent float32 [100001]", same("shape")),
    "dtype": (allreduce(), allreduce(dtype=DType.BFLOAT16),
              "allreduce sum float32 [2, 3]", "allreduce sum bfloat16 [2, 3]",
              "float32 [2, 3]", "sent bfloat16 [2, 3]", same("dtype")),
    "device": (allreduce(device=Device.CPU), allreduce(device=Device.CUDA),
               "allreduce sum float32 [2, 3]", "allreduce sum float32 [2, 3] on cuda",
               "cpu tensors", "sent cuda tensors", "move the tensors to the same kind of device on every rank"),
    "reduction": (allreduce(op=ReduceOp.MIN), allreduce(op=ReduceOp.AVERAGE),
                  "allreduce min float32 [2, 3]", "allreduce average float32 [2, 3]",
                  "min", "passed average", same("reduction")),
    "scale": (allreduce(prescale=0.5), allreduce(prescale=0.25),
              "allreduce sum float32 [2, 3] prescale 0.5", "allreduce sum float32 [2, 3] prescale 0.25",
              "prescale 0.5 and postscale 1", "passed prescale 0.25 and postscale 1", same("scale factors")),
    "close scales": (allreduce(prescale=1 / 3), allreduce(prescale=0.3333333432674408),
                     "allreduce sum float32 [2, 3] prescale 0.3333333333333333",
                     "allreduce sum float32 [2, 3] prescale 0.3333333432674408",
                     "prescale 0.3333333333333333 and postscale 1",
                     "passed prescale 0.3333333432674408 and postscale 1",
                     same("scale factors")),
    "root": (broadcast(0), broadcast(1),
             "broadcast float32 [2, 3] from rank 0", "broadcast float32 [2, 3] from rank 1",
             "root rank 0", "passed root rank 1", same("root rank")),
    "tensors": (fused((1,), (2,)), fused((1,), (1,), (1,)),
                "allreduce sum float32 2 tensors, 3 elements", "allreduce sum float32 3 tensors, 3 elements",
                "2 tensors", "sent 3 tensors", same("number of tensors")),
    "layout": (fused((1,), (2,)), fused((2,), (1,)),
               "allreduce sum float32 2 tensors, 3 elements", "allreduce sum float32 2 tensors, 3 elements",
               "float32 2 tensors, 3 elements", "sent float32 2 tensors, 3 elements", same("shape")),
    "gathered": (lambda ring: ring.allgather(tensor(ring, (2, 3)).buffer),
                 lambda ring: ring.allgather(tensor(ring, (2, 4)).buffer),
                 "allgather float32 [2, 3]", "allgather float32 [2, 4]",
                 "float32 [2, 3]", "sent float32 [2, 4]", same("shape beyond the first dimension")),
    "scattered": (lambda ring: ring.reducescatter(tensor(ring, (6,)).buffer, tensor(ring, (2,)).buffer),
                  lambda ring: ring.reducescatter(tensor(ring, (3,)).buffer, tensor(ring, (1,)).buffer),
                  "reducescatter sum float32 [6]", "reducescatter sum float32 [3]",
                  "float32 [6]", "sent float32 [3]", same("shape")),
    "exchanged": (lambda ring: ring.alltoall([tensor(ring, (3,)).buffer], [1] * 3),
                  lambda ring: ring.alltoall([tensor(ring, (3,), DType.INT8).buffer], [1] * 3),
                  "alltoall float32 [3]", "alltoall int8 [3]",
                  "float32 [3]", "sent int8 [3]", same("dtype")),
    "gathered to a root": (lambda ring: ring.alltoall([tensor(ring, (3,)).buffer], [1] * 3, root=0),
                           lambda ring: ring.alltoall([tensor(ring, (3,)).buffer], [1] * 3, root=1),
                           "alltoall float32 [3], root rank 0", "alltoall float32 [3], root rank 1",
                           "root rank 0", "passed root rank 1", same("root rank")),
    "name": (allreduce(name="first"), allreduce(name="second"),
             "allreduce sum 'first' float32 [2, 3]", "allreduce sum 'second' float32 [2, 3]",
             "the name 'first'", "passed the name 'second'", SAME_ORDER),
}  # fmt: skip


def placed(line: str, case: str) -> str:
    """A line of the table for tensors that lie where those of this test do."""
    on_device = Tensor.on_device is not None and case != "device"
    return re.sub(r"(elements|\])", r"\1 on cuda", line, count=1) if on_device else line


@also_on_devices
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_sees_the_table(launcher: str, case: str) -> None:
    """Each rank reads which one differs from all others, and every rank's call; afterwards the group works."""
    first, others, *lines, expected, got, advice = CASES[case]
    first_line, other_line = (placed(line, case) for line in lines)

    def body(seat: Seat) -> None:
        ring = seat.open()
        for _ in range(2):
            with pytest.raises(CollectiveMismatch) as caught:
                (first if ring.rank == 0 else others)(ring)
            said, calls, *lines = (re.sub(r", shapes \w+", "", line) for line in str(caught.value).splitlines())
            verb, _, theirs = got.partition(" ")
            wanted = f"rank 0 {verb} {expected}, all others {verb} {theirs}"
            assert said.startswith(f"rank {ring.rank}: {(first_line if ring.rank == 0 else other_line).split()[0]}")
            assert said.endswith(f": {wanted}; {advice}")
            assert said.endswith(advice)
            assert calls.startswith("The calls at sequence ")
            assert lines == [f"  rank 0: {first_line}", f"  ranks 1-2: {other_line}"]
            own = tensor(ring)
            ring.allreduce([own.buffer], [own.buffer])
            assert set(own.values.ravel().tolist()) == {3.0}

    LAUNCHERS[launcher](3, body)


def test_tensors_on_a_device_that_nothing_reaches() -> None:
    """ValueError on every rank, and the group lives on; memory that is not the host's is not touched before."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        for shape in ((3,), (100_000,)):
            with pytest.raises(
                ValueError,
                match=rf"^rank {ring.rank}: allreduce 'w': no transport for cuda tensors of float32; copy them to host "
                "memory on every rank$",
            ):
                allreduce(shape, name="w", device=Device.CUDA, address=8)(ring)
            nowhere = Buffer(8, shape, DType.FLOAT32, device=Device.CUDA)
            for blocking in (True, False):
                with pytest.raises(ValueError, match="broadcast: no transport for cuda tensors"):
                    ring.broadcast(nowhere, nowhere, 0, blocking=blocking).wait()
        ring.barrier()

    as_threads(2, body)
    as_threads(2, body, hosts=(0, 1))


@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=["one host", "hosts"])
@on_ranks(2)
def test_a_rank_that_has_joined_outlives_what_nothing_can_move(seat: Seat, hosts: tuple[int, ...]) -> None:
    """It takes part in what the other one does next, until that one joins too."""
    ring = seat.open()
    if ring.rank == 1:
        with pytest.raises(ValueError, match="no transport for cuda tensors"):
            allreduce((3,), device=Device.CUDA, address=8)(ring)
        ring.barrier()
    assert ring.join().last_rank() == 1


@on_ranks(1)
def test_one_operation_takes_one_kind_of_device(seat: Seat) -> None:
    ring = seat.open()
    own, other = tensor(ring).buffer, Buffer(8, (2, 3), DType.FLOAT32, device=Device.MPS)
    with pytest.raises(ValueError, match="takes tensors on one device, got cpu and mps"):
        ring.allreduce([own, other], [own, other])


@also_on_devices
@pytest.mark.parametrize("who", [0, 1, 2])
@on_ranks(3)
def test_a_joined_rank_outlives_what_others_disagree_on(seat: Seat, who: int) -> None:
    ring = seat.open()
    called, other = (rank for rank in range(3) if rank != who)
    if ring.rank != who:
        with pytest.raises(CollectiveMismatch) as caught:
            allreduce((2,) if ring.rank == called else (3,))(ring)
        mine, theirs = (2, 3) if ring.rank == called else (3, 2)
        assert str(caught.value).splitlines()[0] == (
            f"rank {ring.rank}: allreduce: expected float32 [{mine}], "
            f"rank {other if ring.rank == called else called} sent float32 [{theirs}]; "
            "call it with the same shape on every rank"
        )
        ring.barrier()
        time.sleep(0.05 if ring.rank == other else 0.0)
    assert ring.join().last_rank() == other


@also_on_devices
@on_ranks(2)
def test_a_joined_rank_takes_part_in_sums_only(seat: Seat) -> None:
    ring = seat.open()
    if ring.rank == 0:
        with pytest.raises(
            CollectiveMismatch, match="rank 1 has joined, and a joined rank takes part in barriers, sums"
        ):
            allreduce(op=ReduceOp.MAX)(ring)
    ring.join()


@also_on_devices
@on_ranks(2)
def test_a_queued_mismatch_fails_its_own_handle(seat: Seat) -> None:
    """Operations before and after it in the queue complete."""
    ring = seat.open()
    tensors = [tensor(ring), tensor(ring, (5,) if ring.rank else (4,)), tensor(ring)]
    before, wrong, after = (ring.allreduce([t.buffer], [t.buffer], blocking=False) for t in tensors)
    before.wait()
    with pytest.raises(CollectiveMismatch, match="call it with the same shape on every rank"):
        wrong.wait()
    after.wait()
    assert set(tensors[2].values.ravel().tolist()) == {2.0}


@also_on_devices
@on_ranks(2)
def test_one_name_may_be_missing(seat: Seat) -> None:
    """A rank that gives no name agrees with any."""
    ring = seat.open()
    allreduce(name="" if ring.rank else "grad")(ring)


@on_ranks(3)
def test_no_rank_is_odd_where_three_differ(seat: Seat) -> None:
    ring = seat.open()
    with pytest.raises(CollectiveMismatch, match=rf"expected float32 \[{ring.rank + 2}\], rank . sent"):
        allreduce((ring.rank + 2,))(ring)


@also_on_devices
@on_ranks(3)
def test_a_missing_name_does_not_hide_two_that_differ(seat: Seat) -> None:
    """Each agrees with the rank that gives none, and not with the other."""
    ring = seat.open()
    with pytest.raises(CollectiveMismatch, match=r"the name 'a'|the name 'b'") as caught:
        allreduce(name=["a", "", "b"][ring.rank])(ring)
    assert "all others" not in str(caught.value), "the one without a name agrees with both"
    with pytest.raises(CollectiveMismatch, match=r"the name 'a'|the name 'b'"):
        allreduce(name=["", "a", "b"][ring.rank])(ring)
    allreduce()(ring)


@pytest.mark.parametrize("name", ["é" * 60, "x" + "é" * 60, "n" * 500])
@on_ranks(2)
def test_names_are_cut_where_a_character_ends(seat: Seat, name: str) -> None:
    """Names travel in a header of fixed size; what is left of them is text in errors and in snapshots."""
    ring = seat.open()
    with pytest.raises(CollectiveMismatch, match=name[:30]):
        allreduce((2,) if ring.rank else (3,), name=name)(ring)
    kept, hashed = ring.snapshot()[0]["name"].rsplit("~", 1)
    assert name.startswith(kept)
    assert len(kept) >= 30
    assert int(hashed, 16) >= 0


@pytest.mark.parametrize("name", ["n" * 500, "grad\0"])
@on_ranks(2)
def test_names_that_are_cut_are_compared_whole(seat: Seat, name: str) -> None:
    ring = seat.open()
    with pytest.raises(CollectiveMismatch, match=r"expected the name '.*', rank . passed the name"):
        allreduce(name=f"{name}{ring.rank}")(ring)
    allreduce(name=name)(ring)


@also_on_devices
@on_ranks(2)
def test_a_difference_within_a_group_of_tensors_is_seen_in_the_table(seat: Seat) -> None:
    ring = seat.open()
    tensors = [tensor(ring, shape).buffer for shape in ([(2,), (4,)] if ring.rank else [(4,), (2,)])]
    with pytest.raises(CollectiveMismatch) as caught:
        ring.allreduce(tensors, tensors)
    rows = [line.partition("float32")[2] for line in str(caught.value).splitlines()[2:4]]
    assert rows[0] != rows[1]
    own = tensor(ring)
    ring.allreduce([own.buffer], [own.buffer], prescale=math.nan)


@on_ranks(2)
def test_arguments_that_cannot_be_right(seat: Seat) -> None:
    """ValueError on the rank that passed them, before anything is sent: the others need not know."""
    ring = seat.open()
    own = tensor(ring, (4,))
    with pytest.raises(ValueError, match="splits must be one per rank and add up to the tensor's 4 elements"):
        ring.alltoall([own.buffer], [1, 2])
    with pytest.raises(ValueError, match="splits must be one per rank"):
        ring.alltoall([own.buffer], [4])
    with pytest.raises(ValueError, match="a split is negative"):
        ring.alltoall([own.buffer], [5, -1])
    with pytest.raises(ValueError, match="root 2 is not in this group of 2"):
        ring.broadcast(own.buffer, own.buffer, 2)
    with pytest.raises(ValueError, match="at most 8 are supported"):
        allreduce((1,) * 9)(ring)
    scalar = tensor(ring, ())
    with pytest.raises(ValueError, match="has no rows to scatter"):
        ring.reducescatter(scalar.buffer, scalar.buffer)
    ring.barrier()
    ring.close()
    with pytest.raises(ValueError, match=r"rank .: barrier: this communicator is closed"):
        ring.barrier()


@pytest.mark.parametrize("number", [-1, max(len(DType), len(ReduceOp)), 1 << 20])
@on_ranks(1)
def test_a_number_that_is_no_dtype_or_reduction(seat: Seat, number: int) -> None:
    """ValueError that names the argument, before the core looks anything up by it."""
    native = seat.open()._native
    values = {"dtype": len(DType), "device": 4, "op": len(ReduceOp)}
    for name, count in values.items():
        dtype, device, op = (number if name == one else 0 for one in values)
        with pytest.raises(ValueError, match=rf"{name} must be between 0 and {count - 1}, got {number}"):
            native.start("allreduce", [(0, 0, 0)], [0], dtype, (device, 0, 0), "", True, 0.0, op=op)
    with pytest.raises(ValueError, match="there is no operation 'all'"):
        native.start("all", [(0, 0, 0)], [0], 0, (0, 0, 0), "", True, 0.0)
