"""Which path an operation takes, as a table, and the gates of each path as its cost says."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import numpy as np
import pytest

from native.calls import Guard
from native.ranks import Seat, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import Device, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core

# What a rank posts: where its tensors are, or that it has joined.
ORDINARY: dict[str, Any] = {}
INLINE = {"is_inline": True}
READ = {"input_in_ring": True}
RING = {"input_in_ring": True, "output_in_ring": True}
JOINED = {"operation": "join"}
ADASUM = {"op": ReduceOp.ADASUM}
GPU = {"device": Device.CUDA}

# operation, what ranks 0, 1, ... post, the path on one host, the path between two.
TABLE: list[tuple[str, list[dict[str, Any]], str, str]] = [
    ("barrier", [ORDINARY, ORDINARY], "gate", "eager"),
    ("commit", [ORDINARY, ORDINARY], "gate", "eager"),
    ("join", [ORDINARY, ORDINARY], "gate", "eager"),
    ("allreduce", [INLINE], "alone", ""),
    ("allreduce", [RING], "alone", ""),
    ("allreduce", [ORDINARY], "alone", ""),
    ("allreduce", [INLINE, INLINE], "one-shot", "eager"),
    ("allreduce", [INLINE, JOINED], "one-shot", "eager"),
    ("allreduce", [INLINE, ORDINARY], "staged", "ring"),
    ("allreduce", [{"count": 1000}, {"count": 1000}], "staged", "doubling"),
    ("allreduce", [RING, RING], "push", "ring"),
    ("allreduce", [RING, JOINED], "push", "ring"),
    ("allreduce", [RING, READ], "staged", "ring"),
    ("allreduce", [RING, ORDINARY], "staged", "ring"),
    ("allreduce", [ORDINARY, ORDINARY], "staged", "ring"),
    ("allreduce", [RING | ADASUM, RING | ADASUM], "adasum", "gathered"),
    ("allreduce", [ADASUM], "adasum", ""),
    ("reducescatter", [INLINE, INLINE], "one-shot", "eager"),
    ("reducescatter", [READ, READ], "pull", "pairwise"),
    ("reducescatter", [READ, ORDINARY], "staged", "pairwise"),
    ("broadcast", [INLINE, INLINE], "one-shot", "eager"),
    ("broadcast", [READ | {"root": 0}, ORDINARY | {"root": 0}], "pull", "chain"),
    ("broadcast", [READ | {"root": 1}, ORDINARY | {"root": 1}], "staged", "chain"),
    ("allgather", [INLINE, INLINE], "one-shot", "eager"),
    ("allgather", [READ, READ], "pull", "landing"),
    ("allgather", [INLINE, ORDINARY], "staged", "landing"),
    ("alltoall", [INLINE, INLINE], "one-shot", "eager"),
    ("alltoall", [READ, READ], "pull", "pairwise"),
    ("alltoall", [ORDINARY, READ], "staged", "pairwise"),
    ("allreduce", [GPU], "copy", ""),
    ("allreduce", [GPU, GPU], "nccl", "nccl"),
    ("allreduce", [JOINED, GPU], "nccl", "nccl"),
    ("allreduce", [GPU | ADASUM, GPU | ADASUM], "adasum", "gathered"),
    ("allreduce", [GPU | INLINE | {"dtype": DType.INT16}] * 2, "one-shot", "eager"),
    ("reducescatter", [GPU], "copy", ""),
    ("reducescatter", [GPU, GPU], "nccl", "nccl"),
    ("broadcast", [GPU], "copy", ""),
    ("broadcast", [GPU, GPU], "nccl", "nccl"),
    ("allgather", [GPU], "copy", ""),
    ("allgather", [GPU, GPU], "nccl", "nccl"),
    ("alltoall", [GPU], "copy", ""),
    ("alltoall", [GPU, GPU], "nccl", "nccl"),
]


@pytest.mark.parametrize(("operation", "posted", "on_one_host", "between_hosts"), TABLE)
def test_the_path_of(operation: str, posted: list[dict[str, Any]], on_one_host: str, between_hosts: str) -> None:
    headers = [core.Header(**{"operation": operation, "count": 1 << 20, **one}) for one in posted]
    assert core.choose(headers, hosts=1, devices="nccl").name == on_one_host
    if between_hosts:
        assert core.choose(headers, hosts=2, devices="nccl").name == between_hosts


def test_the_table_takes_every_path() -> None:
    paths = {(path.operation, path.between_hosts, path.name) for path in core.paths()}
    taken = {(operation, False, on_one) for operation, _, on_one, _ in TABLE}
    taken |= {(operation, True, between) for operation, _, _, between in TABLE if between}
    assert taken == paths


@pytest.mark.parametrize("device", set(Device) - {Device.CPU})
def test_a_device_that_nothing_reaches(device: Device) -> None:
    headers = [core.Header("allreduce", device=device, dtype=DType.FLOAT32)] * 2
    said = f"no transport for {device.name.lower()} tensors of float32; copy them to host memory on every rank"
    for hosts in (1, 2):
        with pytest.raises(ValueError, match=said):
            core.choose(headers, hosts=hosts)


def test_a_path_for_nobody() -> None:
    for hosts in (1, 2):
        with pytest.raises(ValueError, match="a path is chosen for at least one rank, got no headers"):
            core.choose([], hosts=hosts)


SEGMENT = 64 << 10
BYTES = 4 * SEGMENT
COUNT = BYTES // 4


def gates_of(ring: Communicator, call: Callable[[], object]) -> int:
    """How many gates this rank passes in a call."""
    before = {entry["rank"]: entry for entry in ring._native.activity()}
    call()
    after = {entry["rank"]: entry for entry in ring._native.activity()}
    rank = ring.ranks[ring.rank]
    return int(after[rank]["arrivals"] - before[rank]["arrivals"])


def calls(ring: Communicator) -> dict[tuple[str, str], Callable[[], object]]:
    """A call for each path, by operation and path: staged and push and what they are between hosts."""
    values = np.ones(COUNT)
    plain = Tensor.of(ring, values, DType.FLOAT32).buffer
    placed = Tensor.of(ring, values, DType.FLOAT32, ring=True).buffer
    little = Tensor.of(ring, np.ones(ring.size), DType.FLOAT32).buffer
    spare = Tensor.of(ring, values, DType.FLOAT32).buffer
    splits = [COUNT // ring.size] * ring.size
    several = ring._native.host_of != []
    return {
        ("barrier", "eager" if several else "gate"): ring.barrier,
        ("commit", "eager" if several else "gate"): lambda: ring.commit(Guard()),
        ("allreduce", "eager" if several else "one-shot"): lambda: ring.allreduce([little], [little]),
        ("allreduce", "ring" if several else "push"): lambda: ring.allreduce([placed], [placed]),
        ("allreduce", "ring" if several else "staged"): lambda: ring.allreduce([plain], [plain]),
        ("allreduce", "gathered" if several else "adasum"): lambda: ring.allreduce(
            [placed], [placed], op=ReduceOp.ADASUM
        ),
        ("reducescatter", "eager" if several else "one-shot"): lambda: ring.reducescatter(little, spare),
        ("reducescatter", "pairwise" if several else "pull"): lambda: ring.reducescatter(placed, spare),
        ("reducescatter", "pairwise" if several else "staged"): lambda: ring.reducescatter(plain, spare),
        ("broadcast", "eager" if several else "one-shot"): lambda: ring.broadcast(little, little, 0),
        ("broadcast", "chain" if several else "pull"): lambda: ring.broadcast(placed, placed, 0),
        ("broadcast", "chain" if several else "staged"): lambda: ring.broadcast(plain, plain, 0),
        ("allgather", "eager" if several else "one-shot"): lambda: ring.allgather(little),
        ("allgather", "landing" if several else "pull"): lambda: ring.allgather(placed),
        ("allgather", "landing" if several else "staged"): lambda: ring.allgather(plain),
        ("alltoall", "eager" if several else "one-shot"): lambda: ring.alltoall([little], [1] * ring.size),
        ("alltoall", "pairwise" if several else "pull"): lambda: ring.alltoall([placed], splits),
        ("alltoall", "pairwise" if several else "staged"): lambda: ring.alltoall([plain], splits),
    }


@pytest.mark.parametrize(("size", "hosts"), [(2, ()), (4, ()), (2, (0, 1)), (4, (0, 0, 1, 1))])
def test_a_path_passes_the_gates_of_its_cost(size: int, hosts: tuple[int, ...]) -> None:
    costs = {(path.operation, path.name): path.gates for path in core.paths() if path.between_hosts == bool(hosts)}
    names = {"p": size, "S": BYTES, "seg": SEGMENT, "ceil": ceil, "log2": log2}

    def body(seat: Seat) -> None:
        ring = seat.open(inline_bytes=4096, segment_bytes=SEGMENT)
        for path, call in calls(ring).items():
            expected = eval(costs[path], {"__builtins__": {}}, dict(names))
            assert gates_of(ring, call) == expected, path

    as_threads(size, body, hosts=hosts)
