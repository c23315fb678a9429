"""Handles of allreduces of tensors: what they keep, and for how long."""

from __future__ import annotations

import gc
import weakref
from threading import Event

import pytest
import torch

from native.bindings.test_tensor_reader import READER
from native.collectives.test_small_allreduce import start
from native.ranks import Seat, as_threads, on_ranks
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.torch.tensors import reader

pytestmark = pytest.mark.skipif(READER is None, reason="this torch has no C functions of DLPack")


def test_a_dropped_one_keeps_its_tensor_until_the_operation_has_ended() -> None:
    looked = Event()

    def body(seat: Seat) -> None:
        ring = seat.open()
        tensor = torch.ones(2)
        known = weakref.ref(tensor)
        if seat.rank == 0:
            start(ring, tensor)
            del tensor
            assert known() is not None
            looked.set()
        else:
            assert looked.wait(30)
            start(ring, tensor).wait()
            assert tensor.tolist() == [2.0] * 2
            del tensor
        ring.barrier()
        ring.barrier(blocking=False).wait()
        assert known() is None

    as_threads(2, body)


@on_ranks(1)
def test_one_that_has_ended_at_once_keeps_nothing_for_others(seat: Seat) -> None:
    ring = seat.open()
    tensors = [torch.ones(1), torch.ones(2)]
    known = weakref.ref(tensors[0])
    work = start(ring, tensors)
    assert work.done()
    assert work.wait() is work.wait() is tensors
    del work, tensors
    assert known() is None


@on_ranks(1)
def test_one_that_its_tensor_refers_to_is_collected(seat: Seat) -> None:
    ring = seat.open()
    tensor = torch.ones(2)
    tensor.handle = start(ring, tensor)  # type: ignore[attr-defined]
    tensor.handle.wait()  # type: ignore[attr-defined]
    known = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert known() is None


@on_ranks(2)
def test_many_that_nobody_waits_for_are_let_go_of(seat: Seat) -> None:
    ring = seat.open()
    known = []
    for _ in range(40):
        tensor = torch.ones(1)
        known.append(weakref.ref(tensor))
        start(ring, tensor)
        ring.barrier()
    assert sum(ref() is not None for ref in known) < 20


def test_a_flat_reader_matches_tensors_of_as_many_elements() -> None:
    flat = reader(flat=True)
    assert flat is not None

    def body(seat: Seat) -> None:
        ring = seat.open()
        tensor = torch.ones(2, 3) if seat.rank else torch.ones(6, 1, 1)
        for _ in range(2):
            assert ring.allreduce_tensors(flat, tensor, tensor, ReduceOp.SUM, 1.0, 1.0, "")
        assert tensor.flatten().tolist() == [4.0] * 6
        assert READER is not None
        with pytest.raises(CollectiveMismatch, match=r"\[6, 1, 1\]"):
            ring.allreduce_tensors(READER, tensor, tensor, ReduceOp.SUM, 1.0, 1.0, "")

    as_threads(2, body)
