"""Where NCCL cannot be used, all ranks go through host memory together, and say why."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from native.fakes.device import FakeDevice, devices, knobs
from native.ranks import LIMIT, Seat, as_hosts, as_threads
from ring_notebook.core.buffers import Device, DType
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.native import core, warn_of_host_memory

# why it refuses, host, index, uuid, NCCL
CARD = ("", "a", 0, "x", 22907)
CARDS: list[tuple[list[tuple[str, str, int, str, int]], str]] = [
    ([CARD, ("", "a", 1, "y", 22907)], ""),
    ([CARD, ("", "b", 0, "y", 22907)], ""),
    # Containers of one machine: each has a host name of its own, and NCCL would not notice.
    ([CARD, ("", "b", 0, "x", 22907)], "ranks 5 and 7 share device 0 of host a"),
    ([CARD, ("it has none", "a", 1, "y", 22907)], "rank 7: it has none"),
    ([CARD, ("", "a", 0, "x", 22907)], "ranks 5 and 7 share device 0 of host a"),
    ([CARD, ("", "b", 0, "y", 22606)], "rank 5 has NCCL 2.29.7 and rank 7 has 2.26.6"),
]


@pytest.mark.parametrize(("cards", "why"), CARDS)
def test_what_ranks_conclude_from_their_cards(cards: list[tuple[str, str, int, str, int]], why: str) -> None:
    assert core.why_not_nccl(cards, [5, 7]) == why


# operation, type, reduction, factors, whether NCCL carries it out
MOVES: list[tuple[str, DType, ReduceOp, tuple[float, float], bool]] = [
    ("allreduce", DType.FLOAT32, ReduceOp.SUM, (1, 1), True),
    ("allreduce", DType.FLOAT32, ReduceOp.AVERAGE, (0.1, 1), True),
    ("allreduce", DType.BFLOAT16, ReduceOp.AVERAGE, (1, 1), True),
    ("allreduce", DType.BFLOAT16, ReduceOp.SUM, (0.5, 0.25), True),
    ("allreduce", DType.BFLOAT16, ReduceOp.SUM, (0.1, 1), False),  # bfloat16 has no 0.1
    ("allreduce", DType.FLOAT16, ReduceOp.SUM, (1 / 3, 1), True),  # of three ranks: an average
    ("allreduce", DType.INT32, ReduceOp.SUM, (1, 1), True),
    ("allreduce", DType.INT32, ReduceOp.AVERAGE, (1, 1), False),
    ("allreduce", DType.INT32, ReduceOp.SUM, (2, 0.5), False),
    ("allreduce", DType.INT16, ReduceOp.SUM, (1, 1), False),
    ("allreduce", DType.BOOL, ReduceOp.MAX, (1, 1), False),
    ("allreduce", DType.FLOAT32, ReduceOp.MAX, (1, 1), True),
    ("allreduce", DType.FLOAT32, ReduceOp.MAX, (2, 1), False),
    ("allreduce", DType.FLOAT32, ReduceOp.ADASUM, (1, 1), False),
    ("reducescatter", DType.INT64, ReduceOp.SUM, (1, 1), True),
    ("allgather", DType.BOOL, ReduceOp.SUM, (1, 1), True),
    ("broadcast", DType.INT16, ReduceOp.SUM, (1, 1), True),
    ("alltoall", DType.FLOAT64, ReduceOp.SUM, (1, 1), True),
]


@pytest.mark.parametrize(("operation", "dtype", "op", "factors", "by_nccl"), MOVES)
@pytest.mark.parametrize("hosts", [1, 2])
def test_what_nccl_carries_out(
    operation: str, dtype: DType, op: ReduceOp, factors: tuple[float, float], by_nccl: bool, hosts: int
) -> None:
    header = core.Header(operation, dtype=dtype, op=op, device=Device.CUDA, prescale=factors[0], postscale=factors[1])
    assert (core.choose([header] * 3, hosts, "nccl").name == "nccl") == by_nccl
    assert core.choose([header] * 3, hosts, "host").name != "nccl"


def summed(seat: Seat, late: int = 3000, **settings: Any) -> tuple[str, str]:
    ring, device = seat.open(devices=devices(**settings)), FakeDevice(seat.rank)
    for dtype in (DType.FLOAT32, DType.INT16):
        tensor = device.tensor(np.zeros(1000), dtype)
        if dtype is DType.FLOAT32:
            device.fill(tensor, 1.0, microseconds=late)
        else:
            tensor.array[...] = 1
        ring.allreduce([tensor.buffer], [tensor.buffer])
        assert np.all(device.read(tensor) == seat.size)
    gathered = ring.allgather(device.tensor(np.full(3, seat.rank), DType.FLOAT32).buffer)
    result = gathered.device_output()
    values = np.frombuffer(device.bytes_at(result.address, result.nbytes), np.float32)
    assert values.tolist() == [float(rank) for rank in range(seat.size) for _ in range(3)]
    return ring.device_transport()


FAULTS = {
    "same_uuid": ({"cuda_same_uuid": 1}, r"ranks 0 and 1 share device 0 of host .+"),
    "init_fails": ({"nccl_init_fails": 1}, "rank [012]: NCCL: unhandled system error"),
    "init_hangs": ({"nccl_init_hangs": 1}, "rank [012]: NCCL has not connected in 0.2 s"),
    "wrong": ({"nccl_wrong": 1}, "rank [012]: NCCL gives wrong sums: 7.0+ instead of 6.0+"),
    "error": (
        {"nccl_error_at": 1},  # of one rank, while the others' kernels wait for it: they learn of it at once
        "rank [012]: NCCL: remote process exited or there was a network error",
    ),
    "old": ({"nccl_version": 21805}, r"rank 0: NCCL 2.18.5 is too old; 2.26.0 or newer is needed"),
    "very old": ({"nccl_version": 2804}, r"rank 0: NCCL 2.8.4 is too old; 2.26.0 or newer is needed"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("launch", [as_threads, as_hosts])
def test_all_ranks_go_through_host_memory_together(launch: Any, fault: str, recwarn: pytest.WarningsRecorder) -> None:
    settings, why = FAULTS[fault]
    warn_of_host_memory.cache_clear()
    limit = 0.2 if fault == "init_hangs" else LIMIT
    with knobs(**settings):
        found = launch(3, lambda seat: summed(seat, connect_limit=limit))
    assert {transport for transport, _ in found} == {"host"}
    reasons = {reason for _, reason in found}
    assert len(reasons) == 1
    assert re.fullmatch(why, reasons.pop())
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == 1, said
    assert re.search(why, said[0])
    assert "copies them there and back" in said[0]


def test_nccl_or_nothing() -> None:
    def body(seat: Seat) -> None:
        ring = seat.open(devices=devices(choice="nccl" if seat.rank == 1 else "auto"))
        device = FakeDevice(seat.rank)
        tensor = device.tensor(np.ones(3), DType.FLOAT32)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"RING_DEVICE=nccl, and NCCL cannot be used: .*share device"):
                ring.allreduce([tensor.buffer], [tensor.buffer])
        ring.barrier()

    with knobs(cuda_same_uuid=1):
        as_threads(2, body)


def test_ranks_that_share_a_device_by_nccl() -> None:
    with knobs(cuda_same_uuid=1):
        assert as_threads(2, lambda seat: summed(seat, shares=True)) == [("nccl", "")] * 2


def test_host_memory_where_one_rank_asks_for_it() -> None:
    def body(seat: Seat) -> tuple[str, str]:
        return summed(seat, late=300_000, choice="host" if seat.rank == 1 else "auto")

    with pytest.warns(RuntimeWarning, match="rank 1: RING_DEVICE=host"):
        assert as_threads(2, body) == [("host", "rank 1: RING_DEVICE=host")] * 2


def test_a_joined_rank_that_has_used_no_device() -> None:
    def body(seat: Seat) -> tuple[str, str]:
        ring, device = seat.open(devices=devices()), FakeDevice(seat.rank)
        if seat.rank == 0:
            tensor = device.tensor(np.ones(3), DType.FLOAT32)
            ring.allreduce([tensor.buffer], [tensor.buffer])
            assert np.all(device.read(tensor) == 1)
        ring.join()
        return ring.device_transport()

    with pytest.warns(RuntimeWarning, match="it has joined and used no device before"):
        assert as_threads(2, body) == [("host", "rank 1: it has joined and used no device before")] * 2


def test_what_a_process_without_libraries_reports() -> None:
    report = core.Devices(cuda_library="/nowhere/libcuda.so.1", nccl_library="/nowhere/libnccl.so.2").report()
    assert "/nowhere/libcuda.so.1" in report["driver_error"]
    assert "/nowhere/libnccl.so.2" in report["nccl_error"]
    found = devices().report()
    assert (found["driver"], found["nccl"], found["devices"]) == ("13.0", "2.29.7", ["Fake device"] * 8)
