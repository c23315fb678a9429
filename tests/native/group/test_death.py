"""A rank that is killed in the middle of a collective: the others know, and go on without it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from native.calls import ASYNCHRONOUS
from native.over_devices import also_on_devices
from native.ranks import Dead, Seat, as_processes, on_ranks
from native.values import Tensor, produced
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted

LATE = 30.0
"""Seconds within which survivors must have learned: a limit for failure, far above what it takes."""


def forbid_pidfds() -> None:
    """From now on this thread cannot open process descriptors, as in some sandboxes."""
    opens, error = 434, 38  # the system call, numbered alike on all processors, and ENOSYS
    program = struct.pack(
        "HBBI" * 4,
        *(0x20, 0, 0, 0),  # load the number of the call
        *(0x15, 0, 1, opens),  # unless it is this one, skip
        *(0x06, 0, 0, 0x00050000 | error),  # the answer of an error
        *(0x06, 0, 0, 0x7FFF0000),  # allow it
    )
    text = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(text)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    no_new_privileges, seccomp, with_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(seccomp, with_filter, ctypes.addressof(filters), 0, 0):
        pytest.skip("NOT TESTED: system calls cannot be forbidden here")


def goes_on(ring: Communicator) -> list[float]:
    """A staged and a small sum over the survivors."""
    tensors = [Tensor.of(ring, np.full(count, float(ring.rank + 1)), DType.FLOAT32) for count in (5, 300_000)]
    for tensor in tensors:
        ring.allreduce([tensor.buffer], [tensor.buffer])
    return [float(tensor.values[-1]) for tensor in tensors]


def until_it_fails(call: Callable[[], object]) -> CollectiveAborted:
    """Call again and again; the error, which must come soon after the last call began."""
    while True:
        begun = time.monotonic()
        try:
            call()
        except CollectiveAborted as error:
            assert time.monotonic() - begun < LATE
            return error


@also_on_devices
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("call", ASYNCHRONOUS)
@on_ranks(3, as_processes, gives=[[3.0, 3.0], Dead(signal.SIGKILL), [3.0, 3.0]])
def test_killed_while_data_moves(seat: Seat, call: str, blocking: bool) -> list[float]:
    """SIGKILL at some moment of an endless stream of collectives; the survivors open a generation of their own."""
    ring = seat.open(1)
    own = Tensor.of(ring, np.array([os.getpid()]), DType.INT64)
    pids = np.frombuffer(produced(ring.allgather(own.buffer, name="setup")), np.int64)
    if seat.rank == 1:
        # From a thread that knows nothing of the core, so that the end comes wherever the rank is then.
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            ASYNCHRONOUS[call](ring, blocking).wait()
    error = until_it_fails(lambda: ASYNCHRONOUS[call](ring, blocking).wait())
    # One that begins when the death is known gets no number.
    words = rf"rank {seat.rank}: {call.split()[0]}( \(sequence \d+\))? .*rank 1 \(process {pids[1]}\) has died"
    assert re.fullmatch(words, str(error)), error
    return goes_on(seat.open(2, ranks=[0, 2]))


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_while_it_waits(victim: int) -> None:
    """The rank that made the ring memory may die too: the memory lives as long as somebody maps it."""

    def body(seat: Seat) -> list[float]:
        ring = seat.open(1)
        if seat.rank == victim:
            ring.barrier(blocking=False)
            os.kill(os.getpid(), signal.SIGKILL)
        assert f"rank {victim} (process " in str(until_it_fails(ring.barrier))
        return goes_on(seat.open(2, ranks=[rank for rank in range(3) if rank != victim]))

    results = as_processes(3, body)
    assert results.pop(victim) == Dead(signal.SIGKILL)
    assert results == [[3.0, 3.0]] * 2


def test_a_death_is_seen_without_process_descriptors() -> None:
    def body(seat: Seat) -> str:
        if seat.rank == 0:
            forbid_pidfds()
            assert not seat.ring_memory.dead(1)
        ring = seat.open()
        ring.barrier()
        seat.meet()
        if seat.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(until_it_fails(ring.barrier))

    words, end = as_processes(2, body)
    assert "rank 1 (process " in words
    assert "has died" in words
    assert end == Dead(signal.SIGKILL)


@on_ranks(3, as_processes, gives=[None, Dead(signal.SIGKILL), None])
def test_killed_before_the_generation(seat: Seat) -> None:
    """Ranks that wait for a dead rank to open or to join a generation learn that it has died."""
    seat.open(1).barrier()
    seat.meet()
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveAborted, match="has died"):
        seat.open(2, ranks=[0, 1, 2])
    with pytest.raises(CollectiveAborted, match="has died"):
        seat.open(2, ranks=[1, 0, 2])


def fork() -> int:
    """As ``os.fork``, without Python's warning against a fork beside threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@on_ranks(2, as_processes)
def test_a_forked_child_drops_a_communicator_whose_thread_it_has_not(seat: Seat) -> None:
    """A child has its parent's stacks and no threads on them. The C library unmaps all but 40 MiB of them."""
    ring = seat.open()
    over = threading.Event()
    sleepers = [threading.Thread(target=over.wait) for _ in range(40)]
    for sleeper in sleepers[:20]:
        sleeper.start()
    ring.barrier(blocking=False).wait()  # so that there is a progress thread
    for sleeper in sleepers[20:]:
        sleeper.start()
    child = fork()
    if child == 0:
        status = 1
        try:
            last = threading.Thread(target=int)
            last.start()
            last.join()  # with its own stack the others are too many
            seat.opened.clear()
            del ring
            status = 0
        finally:
            os._exit(status)
    over.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_does_no_harm() -> None:
    """A data loader's worker, say: it cannot use the communicator, and its end is not the rank's end."""
    come = multiprocessing.get_context("fork").Event()

    def body(seat: Seat) -> None:
        ring = seat.open()
        if seat.rank == 1:
            assert come.wait(LATE)
        queued = ring.barrier(blocking=False)  # so that there is a progress thread
        child = fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(ValueError, match="a forked process cannot use its parent's communicator"):
                    ring.barrier()
                with pytest.raises(RuntimeError, match="a forked process cannot take ring memory"):
                    ring.empty(10)
                if seat.rank == 0:
                    with pytest.raises(ValueError, match="a forked process cannot wait"):
                        queued.wait()
                ring.close()
                ring.abort("a child has no say in this")
                seat.opened.clear()
                del ring
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        come.set()
        queued.wait()
        assert goes_on(ring) == [3.0, 3.0]

    as_processes(2, body)
