"""Calls that start several operations, of which some ranks start more than others."""

from __future__ import annotations

import numpy as np
import pytest

from native.names import start, total
from native.ranks import LAUNCHERS, Seat, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.work import Call
from ring_notebook.errors import CollectiveMismatch


@pytest.mark.parametrize("named", [True, False], ids=["by name", "in order"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_calls_of_unequal_numbers_of_operations(seat: Seat, launcher: str, named: bool) -> None:
    """All operations of such a call fail on all ranks, in whatever order they are started; what comes next is right."""
    ring = seat.open()
    several = Call(3 if seat.rank == 1 else 1)
    works = []
    for part in range(several.operations):
        own = Tensor.of(ring, np.ones(3 + part), DType.FLOAT32).buffer
        name = f"many, part {part}" if named else ""
        works.append(ring.allreduce([own], [own], name=name, blocking=False, call=several))
    next_one = start(ring, "next" if named else "", 1.0)
    for work in works:
        with pytest.raises(CollectiveMismatch, match=r"of 3 dtypes or devices.*with the same dtypes"):
            work.wait()
    next_one[1].wait()
    assert next_one[0].values.tolist() == [float(seat.size)] * 3
    total(ring)
    alike = Call(2)
    for part in range(2):
        tensor = Tensor.of(ring, np.ones(3 + part), DType.FLOAT32)
        name = f"many, part {part}" if named else ""
        works.append(ring.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=False, call=alike))
    for work in works[-2:]:
        work.wait()
    assert tensor.values.tolist() == [float(seat.size)] * 4
