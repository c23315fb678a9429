"""Which path an operation takes, as a table; `test_costs.py` counts what each costs."""

from __future__ import annotations

from typing import Any

import pytest

from ring_notebook.core.buffers import Device, DType
from ring_notebook.core.communicator import ReduceOp
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
