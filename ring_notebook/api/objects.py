"""Python objects across ranks: pickled, with tensors sent separately; and sums of a few numbers."""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import cloudpickle

from ring_notebook.api.arguments import check_process_set
from ring_notebook.api.handles import check_name
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.api.tensor_adapter import adapter_of, adapters
from ring_notebook.core import world
from ring_notebook.core.buffers import Buffer, DType, from_memoryview
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import RingError

_FAILED = -1
"""Instead of a size: the object could not be pickled, and nothing follows."""
_NO_PICKLE = b"\0"
"""Instead of a pickle, which is never this short: the object could not be pickled."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out of the pickle, to send them separately: a model's state is not copied twice."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, tuple[Any, Buffer]] = {}  # by id, so that a tensor that occurs twice is sent once

    def persistent_id(self, obj: Any) -> Any:
        for adapter in adapters():
            if adapter.can_send(obj):
                if id(obj) not in self.tensors:
                    self.tensors[id(obj)] = obj, adapter.buffer_of(obj)
                _, buffer = self.tensors[id(obj)]
                return adapter.name, id(obj), int(buffer.dtype), tuple(buffer.shape)
        return None


class _Unpickler(pickle.Unpickler):
    """Creates empty tensors in host memory for those that `_Pickler` left out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, tuple[Any, Buffer]] = {}

    def persistent_load(self, pid: Any) -> Any:
        name, key, dtype, shape = pid
        if key not in self.tensors:
            adapter = adapter_of(name)
            tensor = adapter.empty(DType(dtype), shape)
            self.tensors[key] = tensor, adapter.buffer_of(tensor)
        return self.tensors[key][0]


_is_alone = False


@contextmanager
def without_others() -> Iterator[None]:
    """A context in which this rank exchanges no objects with others: exchanges return its own.

    For a rank that joins an elastic job during a training: the others send it their state later.
    """
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def is_alone() -> bool:
    """Whether `without_others` holds."""
    return _is_alone


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the ``obj`` of ``root_rank`` on every rank (Horovod: ``broadcast_object``).

    ``root_rank`` is a global rank. The root returns ``obj`` itself, the others a copy with its tensors in host memory;
    their own ``obj`` is ignored. Tensors are sent without pickling, everything else through cloudpickle. When the
    object cannot be pickled, or has sharded tensors, the root raises the error, and the others RingError.
    """
    check_process_set(process_set)
    if _is_alone:
        return obj
    name = name or "broadcast_object"
    root = process_set.group_rank(root_rank)
    communicator = process_set.in_turn

    def send(data: Any, part: str) -> Any:
        buffer = data if isinstance(data, Buffer) else from_memoryview(data)
        communicator.broadcast(buffer, buffer, root, name=check_name(communicator, f"{name} {part}"))
        return data

    if root == communicator.rank:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(obj)
        except BaseException:
            send(array("q", [_FAILED]), "size")
            raise
        send(array("q", [file.tell()]), "size")
        send(file.getbuffer(), "pickle")
        for _, buffer in pickler.tensors.values():
            send(buffer, "tensor")
        return obj
    [size] = send(array("q", [0]), "size")
    if size == _FAILED:
        raise RingError(f"rank {world.current().rank}: rank {root_rank} failed to pickle its object for {name}")
    unpickler = _Unpickler(io.BytesIO(send(bytearray(size), "pickle")))
    received = unpickler.load()
    for _, buffer in unpickler.tensors.values():
        send(buffer, "tensor")
    return received


def gather_objects(obj: Any, name: str, process_set: ProcessSet) -> list[Any]:
    """The objects of all ranks of ``process_set``, in group order.

    When one cannot be pickled, its rank raises the error of pickle, and the others RingError.
    """
    if _is_alone:
        return [obj]
    failure: BaseException | None = None
    payload = bytearray(_NO_PICKLE)
    try:
        payload = bytearray(cloudpickle.dumps(obj))
    except BaseException as error:
        failure = error
    communicator = process_set.in_turn
    work = communicator.allgather(from_memoryview(payload), name=check_name(communicator, name))
    if failure is not None:
        raise failure
    sizes, gathered = work.counts(), work.output()
    if len(_NO_PICKLE) in sizes:
        failed = (process_set.ranks or [])[sizes.index(len(_NO_PICKLE))]
        raise RingError(f"rank {world.current().rank}: rank {failed} failed to pickle its object for {name}")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [pickle.loads(gathered[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks of ``process_set``, in group order (Horovod: ``allgather_object``, for all ranks).

    Everything is sent through cloudpickle, tensors too. When an object cannot be pickled, its rank raises the error of
    pickle, and the others RingError.
    """
    return gather_objects(obj, name or "allgather_object", process_set)


N = TypeVar("N", int, float)


def allreduce_numbers(
    numbers: Sequence[N], op: ReduceOp, name: str, process_set: ProcessSet = global_process_set
) -> list[N]:
    """``numbers`` reduced over all ranks, element by element: as int64 where all are ints, else as float64.

    Joined ranks contribute zeros. Raises CollectiveMismatch on every rank when the lengths differ.
    """
    values = array("q" if all(isinstance(number, int) for number in numbers) else "d", numbers)
    buffer = from_memoryview(values)
    process_set.in_turn.allreduce([buffer], [buffer], op=op, name=name)
    return values.tolist()


def are_alike(digest: int, name: str, process_set: ProcessSet, *others: int) -> tuple[bool, list[int]]:
    """Whether all ranks but joined ones have the same ``digest`` (48 bits), and the sums of ``others``."""
    parts = [digest >> 24, digest & 0xFFFFFF]  # small enough that int64 holds the sum of their squares
    numbers = [1, *parts, *(part * part for part in parts), *others]
    ranks, *sums = allreduce_numbers(numbers, ReduceOp.SUM, name, process_set)
    # All numbers are equal if and only if their count times the sum of their squares is the square of their sum.
    return all(ranks * squares == total * total for total, squares in zip(sums[:2], sums[2:4], strict=True)), sums[4:]
