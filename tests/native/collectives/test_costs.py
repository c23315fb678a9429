"""What operations of 8 to 64 ranks take, counted, is what the table of paths and the simulator of many hosts say."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native.ranks import Seat, as_threads
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core

SEGMENT = 64 << 10
LITTLE = 128  # elements that travel in mailboxes: two for each of 64 ranks
Call = Callable[[], object]


def calls(ring: Communicator, much: int, *, several: bool) -> list[tuple[str, str, int, Call]]:
    """Operation, path, bytes of a rank's tensor, and a call that takes the path and checks what comes of it."""
    size = ring.size
    little = Tensor.of(ring, np.full(LITTLE, ring.rank), DType.FLOAT32)
    ones = Tensor.of(ring, np.ones(much), DType.FLOAT32)
    spare = Tensor.of(ring, np.zeros(much), DType.FLOAT32)
    small = Tensor.of(ring, np.zeros(LITTLE), DType.FLOAT32)

    def reduce(source: Tensor, target: Tensor, wanted: float, op: ReduceOp = ReduceOp.SUM) -> Call:
        def call() -> None:
            ring.allreduce([source.buffer], [target.buffer], op=op)
            assert (target.values == wanted).all()

        return call

    def scatter(source: Tensor, wanted: float) -> Call:
        def call() -> None:
            ring.reducescatter(source.buffer, spare.buffer)
            assert (spare.values[: source.buffer.count // size] == wanted).all()

        return call

    def broadcast(tensor: Tensor) -> Call:
        def call() -> None:
            ring.broadcast(tensor.buffer, tensor.buffer, 0)
            assert (tensor.values == tensor.values[0]).all()

        return call

    def gather(tensor: Tensor) -> Call:
        def call() -> None:
            work = ring.allgather(tensor.buffer)
            assert work.counts() == [tensor.buffer.count] * size
            assert np.frombuffer(work.output(), np.float32)[-1] in (1, size - 1)

        return call

    def exchange(tensor: Tensor) -> Call:
        def call() -> None:
            count = tensor.buffer.count
            splits = [*[count // size] * (size - 1), count - count // size * (size - 1)]
            work = ring.alltoall([tensor.buffer], splits)
            assert work.counts() == [splits[ring.rank]] * size
            assert np.frombuffer(work.output(), np.float32)[-1] in (1, size - 1)

        return call

    few, many, total = little.buffer.nbytes, ones.buffer.nbytes, float(sum(range(size)))
    header = core.Header("allreduce", dtype=DType.FLOAT32, count=much)
    hosts = len(set(ring._native.host_of)) or 1
    by_size = core.choose([header] * size, hosts=hosts).name
    # Operation, path on one host, path between several.
    every: list[tuple[str, str, str, int, Callable[[], object]]] = [
        ("barrier", "gate", "eager", 0, ring.barrier),
        ("commit", "gate", "eager", 0, ring.commit),
        ("allreduce", "one-shot", "eager", few, reduce(little, small, total)),
        ("allreduce", "staged", by_size, many, reduce(ones, spare, size)),
        ("reducescatter", "one-shot", "eager", few, scatter(little, total)),
        ("reducescatter", "staged", "pairwise", many, scatter(ones, size)),
        ("broadcast", "staged", "chain", many, broadcast(ones)),
        ("allgather", "one-shot", "eager", few, gather(little)),
        ("allgather", "staged", "landing", many, gather(ones)),
        ("alltoall", "one-shot", "eager", few, exchange(little)),
        ("alltoall", "staged", "pairwise", many, exchange(ones)),
    ]
    if size & (size - 1) == 0:
        every.append(("allreduce", "adasum", "gathered", many, reduce(ones, spare, 1, ReduceOp.ADASUM)))
    if not several:  # tensors in ring memory, which between hosts go as others do
        placed, place = (Tensor.of(ring, np.ones(much), DType.FLOAT32, ring=True) for _ in range(2))
        every += [
            ("allreduce", "push", "", many, reduce(placed, place, size)),
            ("reducescatter", "pull", "", many, scatter(placed, size)),
            ("broadcast", "one-shot", "", few, broadcast(small)),
            ("broadcast", "pull", "", many, broadcast(placed)),
            ("allgather", "pull", "", many, gather(placed)),
            ("alltoall", "pull", "", many, exchange(placed)),
        ]
    return [
        (operation, between if several else on_one, nbytes, call) for operation, on_one, between, nbytes, call in every
    ]


def simulated(operation: str, path: str, hosts: int, local: int, nbytes: int) -> tuple[int, int]:
    """Messages and bytes that all hosts together send, as `benchmarks/many_hosts.py` follows those of a sum."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    many_hosts = importlib.import_module("many_hosts")
    agreement, lane = (many_hosts.Fabric(hosts, many_hosts.Network()) for _ in range(2))
    ranks = hosts * local
    splits = 8 * local * ranks if operation == "alltoall" else 0
    payload = 0
    if path == "eager" and nbytes:
        payload = splits + (nbytes if operation in ("allreduce", "reducescatter") else local * nbytes)
    many_hosts.agree(agreement, payload)
    messages, sent = agreement.messages, agreement.bytes + (0 if payload else agreement.messages * splits)
    if path in ("doubling", "ring"):  # of each lane, whose chunk a rank of each host has
        (many_hosts.double if path == "doubling" else many_hosts.ring)(lane, nbytes // local)
        return messages + local * lane.messages, sent + local * lane.bytes
    copies = (hosts - 1) * ranks  # where each rank sends to each other host once, or each host to each rank
    more, behind = {
        "eager": (0, 0),
        "chain": ((hosts - 1) * local * ceil(nbytes / local / many_hosts.MESSAGE), (hosts - 1) * nbytes),
        "landing": (copies, copies * nbytes),
        "gathered": (copies, copies * nbytes),
        "pairwise": (copies * local, (ranks - local) * nbytes) if splits else (copies, (hosts - 1) * nbytes),
    }[path]
    return messages + more, sent + behind


@pytest.mark.parametrize(
    ("hosts", "local", "much"),
    [
        *[(1, 2, 1 << 16), (1, 8, 1 << 15), (2, 4, 1 << 15), (8, 1, 1 << 15), (4, 4, 1 << 15)],
        *[(1, 64, 1 << 13), (8, 8, 1 << 13)],
        *[(13, 1, 13 << 11), (16, 2, 1 << 15)],  # agree by a plan
    ],
)
def test_what_is_counted_is_what_the_table_and_the_simulator_say(hosts: int, local: int, much: int) -> None:
    size = hosts * local

    def body(seat: Seat) -> list[tuple[str, str, int, dict[str, Any]]]:
        ring = seat.open(inline_bytes=4096, segment_bytes=SEGMENT, spin=0.0)
        counted = [("", "", 0, ring.counts())]
        for operation, path, nbytes, call in calls(ring, much, several=hosts > 1):
            call()
            counted.append((operation, path, nbytes, ring.counts()))
        return counted

    host_of = tuple(rank // local for rank in range(size)) if hosts > 1 else ()
    ranks = as_threads(size, body, hosts=host_of, arena=2 << 30)
    paths = {(path.operation, path.name): path for path in core.paths() if path.between_hosts == (hosts > 1)}
    names = {"p": size, "seg": SEGMENT, "ceil": ceil, "log2": log2}
    for at, (operation, name, nbytes, _) in enumerate(ranks[0][1:]):
        path = paths[operation, name]
        gates = eval(path.gates, {"__builtins__": {}}, {**names, "S": nbytes})
        messages = sent = 0
        between: Counter[tuple[int, int]] = Counter()
        for rank, counted in enumerate(ranks):
            before, after = counted[at][3], counted[at + 1][3]
            assert after["operations"] - before["operations"] == 1, (operation, name)
            assert after["gates"] - before["gates"] == gates, (operation, name)
            for host, (now, then) in enumerate(zip(after["sent"], before["sent"], strict=True)):
                between[rank // local, host] += now[0] - then[0]
                messages += now[0] - then[0]
                sent += now[1] - then[1]
        wanted = simulated(operation, name, hosts, local, nbytes) if hosts > 1 else (0, 0)
        assert (messages, sent) == wanted, (operation, name)
        if hosts > 1 and core.agree_directly(hosts):
            formula = path.messages.replace("256K", str(256 << 10))
            most = eval(formula, {"__builtins__": {}}, {**names, "S": nbytes, "h": hosts, "l": local})
            assert max(between.values()) == most, (operation, name)


# Messages and bytes that one host sends in an allreduce of 64 ranks a host.
SENT = [
    # hosts, bytes of a tensor, path, messages, bytes
    (2, 4, "eager", 1, 284),
    (16, 4, "eager", 4, 4_532),
    (1000, 4096, "doubling", 10 + 357, 25_912),
    (2, 100 << 20, "ring", 129 + 64 * 6, 104_857_880),
    (1000, 100 << 20, "ring", 10 + 64 * 1998, 209_508_524),
]


@pytest.mark.parametrize(("hosts", "nbytes", "name", "messages", "sent"), SENT)
def test_what_a_thousand_hosts_would_take(hosts: int, nbytes: int, name: str, messages: int, sent: int) -> None:
    header = core.Header("allreduce", dtype=DType.FLOAT32, count=nbytes // 4, is_inline=name == "eager")
    path = core.choose([header] * (hosts * 64), hosts=hosts)
    assert path.name == name
    total = simulated("allreduce", name, hosts, 64, nbytes)
    assert (total[0] // hosts, total[1] // hosts) == (messages, sent)
