"""A face for numpy arrays over the shared floor: what a face for another framework takes, in fifty lines."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from ring_notebook.api.arguments import reduction_of
from ring_notebook.api.basics import Average, Sum, barrier, init, rank, shutdown, size
from ring_notebook.api.elastic_training import State, run
from ring_notebook.api.handles import Handle, synchronize
from ring_notebook.api.objects import allgather_object, broadcast_object
from ring_notebook.api.process_sets import ProcessSet, add_process_set, global_process_set
from ring_notebook.api.tensor_adapter import register_adapter
from ring_notebook.core.buffers import Buffer, DType, from_memoryview
from ring_notebook.core.metrics import log, track

__all__ = [
    "ArrayState",
    "Average",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast_object",
    "init",
    "log",
    "rank",
    "run",
    "shutdown",
    "size",
    "synchronize",
    "track",
]

_DTYPES = {DType.FLOAT32: np.float32, DType.FLOAT64: np.float64, DType.INT64: np.int64}


class NumpyAdapter:
    """Arrays travel beside a pickle, as the bytes that they are."""

    name = "numpy"

    def can_send(self, value: Any) -> bool:
        return type(value) is np.ndarray and value.dtype in _DTYPES.values()

    def buffer_of(self, tensor: Any) -> Buffer:
        return from_memoryview(np.require(tensor, requirements=["C", "W"]))

    def empty(self, dtype: DType, shape: Sequence[int]) -> Any:
        return np.empty(tuple(shape), _DTYPES[dtype])


register_adapter(NumpyAdapter())


def allreduce_async(
    array: Any, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to reduce ``array`` into a new one, which `synchronize` returns."""
    how = reduction_of(None, op, 1.0, 1.0, process_set)
    reduced = np.array(array)
    buffer = from_memoryview(reduced)
    communicator = process_set.communicator
    work = communicator.allreduce([buffer], [buffer], op=how.op, name=name or "", blocking=False)
    return Handle(communicator, name or "", [work], lambda: reduced)


def allreduce(array: Any, op: int | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """A new array: ``array`` reduced over all ranks."""
    return synchronize(allreduce_async(array, op=op, process_set=process_set))


class ArrayState(State):
    """The weights of a training, for `run`."""

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.weights = weights
        self.save()

    def save(self) -> None:
        self._saved = deepcopy(self.weights)

    def restore(self) -> None:
        self.weights = deepcopy(self._saved)

    def sync(self) -> None:
        self.weights, self.commits = broadcast_object((self.weights, self.commits))
        self.save()
