"""Python objects across ranks: pickled, with their tensors sent beside the pickle."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ring_notebook.core import world
from ring_notebook.errors import RingError
from ring_notebook.torch.collectives.allgather import gather
from ring_notebook.torch.collectives.arguments import check_process_set
from ring_notebook.torch.collectives.broadcast import broadcast_
from ring_notebook.torch.process_sets import ProcessSet, global_process_set
from ring_notebook.torch.tensors import can_send

__all__ = ["allgather_object", "broadcast_object", "gather_objects"]

_FAILED = -1
"""In place of a size: there is nothing to send, and the others need not wait for it."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out of the pickle, to be sent as they are: a model's state need not be copied twice."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}  # by id, so that a tensor that occurs twice stays one

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.requires_grad or not can_send(obj):
            return None
        self.tensors[id(obj)] = obj
        return id(obj), tuple(obj.shape), obj.dtype


class _Unpickler(pickle.Unpickler):
    """Puts empty CPU tensors in the places of those left out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        key, shape, dtype = pid
        return self.tensors.setdefault(key, torch.empty(shape, dtype=dtype))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The ``obj`` of ``root_rank`` on every rank (Horovod: ``broadcast_object``).

    On the root it is ``obj`` itself, elsewhere a copy whose tensors are in CPU memory; what the others pass does not
    matter. When the object cannot be sent, the root raises what pickle raises, and the others RingError.
    """
    check_process_set(process_set)
    name = name or "broadcast_object"
    if process_set.group_rank(root_rank) == process_set.rank():
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(obj)
        except BaseException:
            broadcast_(torch.tensor([_FAILED]), root_rank, f"{name} size", process_set)
            raise
        broadcast_(torch.tensor([file.tell()]), root_rank, f"{name} size", process_set)
        broadcast_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), root_rank, f"{name} pickle", process_set)
        for tensor in pickler.tensors.values():
            broadcast_(tensor.contiguous(), root_rank, f"{name} tensor", process_set)
        return obj
    size = broadcast_(torch.tensor([0]), root_rank, f"{name} size", process_set)
    if size.item() == _FAILED:
        raise RingError(f"rank {world.current().rank}: rank {root_rank} could not pickle its object for {name}")
    payload = broadcast_(torch.empty(int(size), dtype=torch.uint8), root_rank, f"{name} pickle", process_set)
    unpickler = _Unpickler(io.BytesIO(payload.numpy().data))
    received = unpickler.load()
    for tensor in unpickler.tensors.values():
        broadcast_(tensor, root_rank, f"{name} tensor", process_set)
    return received


def gather_objects(obj: Any, name: str, process_set: ProcessSet) -> list[Any]:
    """The objects of all ranks of ``process_set``, in group order.

    When one cannot be sent, its rank raises what pickle raises, and the others RingError.
    """
    failure: BaseException | None = None
    payload = torch.empty(0, dtype=torch.uint8)  # says that there is none
    try:
        payload = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    except BaseException as error:
        failure = error
    gathered, sizes = gather(payload, name, process_set)
    if failure is not None:
        raise failure
    if not all(sizes):
        failed = (process_set.ranks or [])[sizes.index(0)]
        raise RingError(f"rank {world.current().rank}: rank {failed} could not pickle its object for {name}")
    return [pickle.loads(part.numpy().data) for part in torch.split(gathered, sizes)]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank (Horovod: ``allgather_object``).

    When one cannot be sent, its rank raises what pickle raises, and the others RingError.
    """
    return gather_objects(obj, name or "allgather_object", global_process_set)
