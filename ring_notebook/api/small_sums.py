"""Allreduce of a few Python numbers: what ranks agree on beside the tensors that they train on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.buffers import from_memoryview
from ring_notebook.core.communicator import ReduceOp

__all__ = ["allreduce_numbers"]

N = TypeVar("N", int, float)


def allreduce_numbers(
    numbers: Sequence[N], op: ReduceOp, name: str, process_set: ProcessSet = global_process_set
) -> list[N]:
    """``numbers`` reduced over all ranks, element by element: as int64 where all are ints, else as float64.

    Ranks that have joined contribute zeros. Raises CollectiveMismatch on every rank when the ranks give different
    numbers of them.
    """
    values = array("q" if all(isinstance(number, int) for number in numbers) else "d", numbers)
    buffer = from_memoryview(values)
    process_set.communicator.allreduce([buffer], [buffer], op=op, name=name)
    return values.tolist()
