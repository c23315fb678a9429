"""The last operations of ranks, read from outside, and the first place where ranks part."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from harness import waiting
from native.ranks import Body, Seat, as_hosts, as_processes
from native.values import Tensor
from ring_notebook.analysis.operation_log import (
    Operation,
    Parting,
    as_events,
    complete,
    pack,
    parse,
    parting,
    read_log,
    unpack,
)
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch


@contextmanager
def files(size: int) -> Iterator[list[str]]:
    """A file for the log of each rank, which this process holds, as a launcher does."""
    descriptors = [os.memfd_create("log") for _ in range(size)]
    yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)


def logged(size: int, body: Body, launch: Callable[[int, Body], Any] = as_processes) -> list[Operation]:
    """What the logs hold after ``body`` has run, read when its ranks have gone."""
    with files(size) as paths:

        def with_log(seat: Seat) -> None:
            seat.log = core.OperationLog(paths[seat.rank])
            try:
                body(seat)
            except (CollectiveAborted, CollectiveMismatch):
                seat.meet() if launch is as_hosts else None

        launch(size, with_log)
        return [one for rank, path in enumerate(paths) for one in parse(read_log(path), rank)]


def total(ring: Communicator, name: str = "", count: int = 3) -> None:
    """An allreduce of ``count`` elements."""
    tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer], name=name)


def found(operations: Sequence[Operation], ends: dict[int, str] | None = None) -> Parting:
    """Where they part. They survive the way to another host, and become a trace."""
    result = parting(operations, ends)
    assert result is not None
    marks = [one for one in complete(as_events(operations), ends) if one["cat"] == "parting"]
    assert {one["name"] for one in marks} == {result.text}
    assert {one["pid"] for one in marks} == set(result.ranks)
    return result


def test_a_record_has_all_of_an_operation() -> None:
    """Name, type, shape, times in order, and the line of the caller, also of a small one, for which others wait."""

    def first(seat: Seat) -> None:
        ring = seat.open()
        large = Tensor.of(ring, np.ones((300, 1000)), DType.FLOAT32)
        ring.allreduce([large.buffer], [large.buffer], name="w")

    operations = logged(2, first)
    line = inspect.getsourcelines(first)[1] + 3
    before = time.time_ns()
    for rank in range(2):
        begin, one = [one for one in operations if one.rank == rank and one.state != "note"]
        assert begin.title == "allreduce 'begin'"
        assert one.full == "allreduce 'w' sum float32 [300, 1000]"
        assert (one.nbytes, one.group, one.size, one.generation, one.sequence) == (1_200_000, 0, 2, 1, 2)
        assert one.state == "done"
        assert before - 60e9 < one.called <= one.arrived <= one.ended < before
        assert one.line == f"test_operation_log.py:{line} in first"


def skips(seat: Seat) -> None:
    """Rank 1 leaves one out."""
    ring = seat.open()
    for step in range(3):
        if (seat.rank, step) != (1, 1):
            total(ring, "gradient")
        total(ring, "loss", 1)


def order(seat: Seat) -> None:
    """Rank 2 calls two in another order."""
    ring = seat.open()
    for name in ("b", "a") if seat.rank == 2 else ("a", "b"):
        total(ring, name)


def shape(seat: Seat) -> None:
    """Rank 1 has another shape."""
    ring = seat.open()
    total(ring)
    total(ring, "w", 4 if seat.rank == 1 else 3)


def batches(seat: Seat) -> None:
    """Rank 0 has one batch less, and goes on to the sum at the end of the generation."""
    ring = seat.open()
    for _ in range(2 if seat.rank == 0 else 3):
        total(ring, "gradient")
    total(ring, "accuracy", 1)


def in_a_set(seat: Seat) -> None:
    """Rank 2 differs in a process set of ranks 0 and 2."""
    ring = seat.open()
    part = ring.group([0, 2])
    if part is not None:
        total(part, "w", 5 if seat.rank == 2 else 3)


CALLED = [
    (skips, "rank 1 called allreduce 'loss' sum float32 [1]", "ranks 0, 2 called allreduce 'gradient'"),
    (order, "rank 2 called allreduce 'b' sum float32 [3]", "ranks 0-1 called allreduce 'a'"),
    (shape, "rank 1 called allreduce 'w' sum float32 [4]", "ranks 0, 2 called allreduce 'w' sum float32 [3]"),
    (batches, "rank 0 called allreduce 'accuracy'", "ranks 1-2 called allreduce 'gradient'"),
    (in_a_set, "rank 2 called allreduce 'w' sum float32 [5]", "rank 0 called allreduce 'w' sum float32 [3]"),
]


@pytest.mark.parametrize(("body", "odd", "others"), CALLED, ids=lambda one: getattr(one, "__name__", ""))
def test_ranks_that_call_something_else(body: Body, odd: str, others: str) -> None:
    """The sentence names the rank, what it called, where, and what the others called."""
    text = found(logged(3, body)).text
    assert text.startswith(f"{odd}"), text
    assert others in text
    assert "test_operation_log.py:" in text
    assert ("group of ranks 0, 2" in text) == (body is in_a_set)


def test_over_two_hosts() -> None:
    """The same, where ranks meet over a link."""
    part = found(logged(3, shape, as_hosts))
    assert part.ranks == (1,)
    assert "allreduce 'w' sum float32 [4]" in part.text


def test_a_killed_rank() -> None:
    """Its log is read although nobody has asked it."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        total(ring, "a")
        if seat.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total(ring, "b")

    part = found(logged(3, body), {1: "was killed by SIGKILL"})
    assert part.missing == (1,)
    assert part.text.startswith("rank 1 never came: it was killed by SIGKILL after allreduce 'a'")
    assert "ranks 0, 2 called allreduce 'b' sum float32 [3]" in part.text


def test_a_rank_that_hangs_in_its_program() -> None:
    """While the others wait for it, the log of each says so, before anything has ended."""
    with files(3) as paths:

        def read() -> list[Operation]:
            return [one for rank, path in enumerate(paths) for one in parse(read_log(path), rank)]

        def body(seat: Seat) -> None:
            seat.log = core.OperationLog(paths[seat.rank])
            ring = seat.open()
            total(ring, "a")
            if seat.rank == 2:
                waiting.until(lambda: sum(one.title == "allreduce 'b'" and one.line != "" for one in read()) == 2)
                text = found(read()).text
                assert text.startswith("rank 2 never came: its program has called nothing after allreduce 'a'"), text
                assert "ranks 0-1 called allreduce 'b' sum float32 [3] at test_operation_log.py:" in text
            total(ring, "b")

        as_processes(3, body)
        assert parting(read()) is None


@pytest.mark.parametrize(
    ("library", "place"), [("accelerate/accelerator.py", "train.py:1"), ("trl/trainer.py", "trainer.py:1")]
)
def test_the_line_of_a_loop_behind_a_library(library: str, place: str) -> None:
    """A loop's own line, where a library calls collectives for it; a trainer's, whose caller has one line for all."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        known = {"reduce": ring.allreduce, "buffers": [Tensor.of(ring, np.ones(3), DType.FLOAT32).buffer]}
        source = "def backward(): reduce(buffers, buffers, name='a')"
        exec(compile(source, f"/lib/site-packages/{library}", "exec"), known)
        exec(compile("backward()", "train.py", "exec"), known)

    assert {one.line.partition(" in ")[0] for one in logged(2, body) if one.name == "a"} == {place}


def test_names_that_one_rank_does_not_start() -> None:
    """Of operations that match by name, the one that a rank has not started."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        tensor = Tensor.of(ring, np.ones(3), DType.FLOAT32)
        works = [
            ring.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=False)
            for name in (("a",) if seat.rank == 1 else ("a", "b"))
        ]
        for work in works:
            work.wait()

    part = found(logged(3, body))
    assert part.missing == (1,)
    assert "ranks 0, 2 called allreduce 'b'" in part.text


def test_the_newest_are_kept() -> None:
    """Of more than there is room for; a work that ends late does not end another one's record."""

    def body(seat: Seat) -> None:
        ring = seat.open()
        for step in range(1500):
            total(ring, f"step {step}")

    operations = [one for one in logged(2, body) if one.rank == 0]
    assert [one.name for one in operations] == [f"step {step}" for step in range(1500 - 1024, 1500)]
    assert {one.state for one in operations} == {"done"}


def test_another_process_does_not_write_to_the_log() -> None:
    """A program that a rank starts inherits its environment; its own operations go elsewhere."""
    with files(1) as (path,):
        first = core.OperationLog(path)
        first.note("raised", "train.py", "main", 3, 1, 1)
        pid = os.fork()
        if pid == 0:
            other = core.OperationLog(path)
            other.note("other", "", "", 0, 1, 1)
            os._exit(int(other.path == path))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        (note,) = parse(read_log(path), 0)
        assert (note.state, note.name, note.line) == ("note", "raised", "train.py:3 in main")
        assert unpack(pack(read_log(path))) == read_log(path)


def test_what_is_no_log() -> None:
    """Bytes that nobody has written, or that are damaged, give no operations and no exception but ValueError."""
    random = np.random.default_rng(0)
    with files(1) as (path,):
        log = core.OperationLog(path)
        for step in range(2000):
            log.note(f"step {step}", "train.py", "main", step + 1, 1, 1)
        data = bytearray(read_log(path))
        assert parse(b"", 0) == parse(bytes(len(data)), 0) == []
        for _ in range(3):
            for at in random.integers(8, len(data), 2000):
                data[at] = int(at) % 256
            operations = parse(bytes(data), 0)
            parting(operations)
            complete(as_events(operations))
    with pytest.raises(ValueError, match="a log of operations is invalid"):
        unpack("AAAA")


def barrier(rank: int, sequence: int, state: Literal["done", "failed", "pending", "note"], name: str = "") -> Operation:
    """A call of one of four ranks."""
    when = 1000 * sequence + rank
    ended = 0 if state == "pending" else when + 100
    return Operation(
        rank, "barrier", name or f"step {sequence}", "", 0, 0, 4, 1, sequence, when, when + 1, ended, state, "a.py:1"
    )


def test_a_rank_that_fails_behind_what_others_were_still_in() -> None:
    """Over hosts an abort may reach a rank in an operation that others have completed: it is not where they part."""
    passed = [barrier(rank, 1, "failed" if rank == 2 else "done") for rank in range(4)]
    raised = barrier(3, 0, "note", "raised ValueError: a bad sample")
    raised = replace(raised, called=5000, line="a.py:2")
    part = found([*passed, raised])
    assert part.text == (
        "rank 3 raised ValueError: a bad sample at a.py:2 after barrier 'step 1' at a.py:1, "
        "which rank 2 had not completed"
    )
    part = found([*passed, raised, *(barrier(rank, 2, "failed") for rank in (0, 1))])
    assert part.missing == (3,)
    assert part.text.startswith("rank 3 never came: it raised ValueError: a bad sample at a.py:2 after barrier")
    assert part.text.endswith("ranks 0-1 called barrier 'step 2' at a.py:1")
