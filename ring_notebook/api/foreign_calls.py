"""Collectives in the graphs of other frameworks, whose runtimes call them from their own threads.

A face puts the text of a `ForeignCall` into its graph. When the runtime gets there, the native core calls `carry_out`
with that text, the memory of the inputs, and a function that gives the memory of an output.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ring_notebook.api.arguments import check_scatterable, rows_to_send
from ring_notebook.api.basics import local_rank, local_size
from ring_notebook.api.handles import member_name
from ring_notebook.api.process_sets import ProcessSet, process_set_of
from ring_notebook.core import background_programs, foreign_interrupts, world
from ring_notebook.core.buffers import Buffer, DType, copy_bytes, from_memoryview, integers_of
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import core
from ring_notebook.core.partition import row_split
from ring_notebook.core.step_guard import COMMIT
from ring_notebook.core.work import Call, Work
from ring_notebook.errors import CollectiveError, CollectiveMismatch
from ring_notebook.text.error_text import error_text

Shape = tuple[int, ...]
Allocate = Callable[[int, Shape], int]
"""The address of the output of this number and shape; 0 where the framework cannot give it."""

_REMEMBERED = 16
_steps_made = [0]


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """A collective on a list of tensors, as one operation where possible."""

    kind: str
    """The name of one of the functions in `_KINDS`."""
    name: str = ""
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """A global rank."""
    process_set: int = 0
    """The number of the process set, equal on all ranks."""
    by_name: bool = False
    """Matches calls of the same name on other ranks, in any order; others match by order."""
    rows: bool = False
    """For allgather and alltoall: the numbers of rows from each rank follow the results, as more outputs."""
    commits: bool = False
    """An optimizer step follows: no rank returns before all ranks have their results."""
    equal_rows: bool = False
    """For allgather and alltoall: all ranks give equally many rows, because the graph fixes the results' shapes."""

    def spec(self) -> str:
        """The text for the graph; equal calls have equal texts."""
        return _spec_of(self)

    def backward(self) -> ForeignCall:
        """The collective for this one's gradient, by Horovod's rules; see also `gradient_scale`.

        All ranks compute one loss, so for allgather and broadcast it averages the gradients. The caller then takes
        this rank's rows (allgather), or uses the average on the root only (broadcast). Raises RuntimeError where there
        is no gradient.
        """
        name = f"{self.name} gradient" if self.name else ""
        if self.kind in ("allreduce", "reducescatter") and self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(
                f"{self.kind} with op={ReduceOp(self.op).name.capitalize()} has no gradient; use Average or Sum"
            )
        if self.kind in ("allgather", "broadcast"):
            return ForeignCall("allreduce", name, ReduceOp.AVERAGE, process_set=self.process_set, by_name=self.by_name)
        if self.kind == "reducescatter":
            return ForeignCall("allgather", name, process_set=self.process_set, by_name=self.by_name)
        return replace(self, name=name, commits=False)

    def gradient_scale(self, size: Any) -> Any:
        """The factor of a gradient before `backward`, in a process set of ``size`` ranks.

        With it allgather(reducescatter(x)) has the gradient of allreduce(x), as in Horovod.
        """
        if self.kind != "reducescatter":
            return 1.0
        return self.prescale * self.postscale * (size if self.op == ReduceOp.SUM else 1)


@lru_cache(maxsize=4096)
def _spec_of(call: ForeignCall) -> str:
    return json.dumps(asdict(call))


@lru_cache(maxsize=4096)
def parse(spec: str) -> ForeignCall:
    """The call of a `ForeignCall.spec`. A second line, its place in the graph, is added to its name."""
    text, _, place = spec.partition("\n")
    call = ForeignCall(**json.loads(text))
    return replace(call, name=f"{call.name} {place}") if place else call


_dtypes: dict[str, dict[int, DType]] = {}
_errors: deque[tuple[str, BaseException]] = deque(maxlen=_REMEMBERED)


def register_dtypes(runtime: str, dtypes: dict[int, DType]) -> None:
    """The element types of a runtime, by its numbers."""
    _dtypes[runtime] = dtypes
    core.know_dtypes(runtime, dtypes)


def carry_out(runtime: str, spec: str, tensors: Sequence[tuple[int, Shape, int]], allocate: Allocate) -> str:
    """Carry out the call of ``spec``; the tensors are (address, shape, number of the dtype). Returns an error's text.

    The text is empty after success. `original` finds the exception again.
    """
    try:
        call, dtypes = parse(spec), _dtypes[runtime]
        inputs = [Buffer(address, shape, dtypes[number]) for address, shape, number in tensors]
        _execute(call, inputs, allocate)
    except BaseException as error:
        return noted(error)
    if call.kind == "allreduce" and not call.by_name and len({tensor.dtype for tensor in inputs}) == 1:
        process_set_of(call.process_set).communicator.know_allreduce(
            spec, ReduceOp(call.op), call.prescale, call.postscale, call.name, call.commits
        )
    return ""


def noted(error: BaseException) -> str:
    """Remember a collective's error; returns its text, by which `original` finds it."""
    text = f"{type(error).__name__}: {error}"
    _errors.append((text, error))
    return text


def original(error: BaseException) -> BaseException | None:
    """The collective's exception that a runtime has turned into ``error``; None if it was another failure."""
    text = error_text(error)
    return next((known for told, known in reversed(_errors) if told in text), None)


def execute(call: ForeignCall, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    """Carry out ``call`` of the script, after programs that it has begun. Raises the errors of its collective."""
    background_programs.settle()
    _execute(call, inputs, allocate)


def _execute(call: ForeignCall, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    with foreign_interrupts.in_flight():
        group = _Group(call, process_set_of(call.process_set))
        _KINDS[call.kind](group, inputs, allocate)
        if call.commits and group.set.size() > 1:
            later = group.communicator.commit(name=COMMIT)
            if later is not None:
                raise later
        _steps_made[0] += call.commits


def steps_made() -> int:
    """How many optimizer steps this process has committed to."""
    return _steps_made[0] + core.foreign_steps()


def static_shapes(call: ForeignCall, shapes: Sequence[Shape], process_set: ProcessSet) -> list[Shape]:
    """The shapes of the results for a framework that has to know them, where all ranks have the same ``shapes``."""
    size, rank = process_set.size(), process_set.rank()
    if call.kind == "allgather":
        return [(size * (shape[0] if shape else 1), *shape[1:]) for shape in shapes]
    if call.kind == "reducescatter":
        for shape in shapes:
            check_scatterable(shape, ReduceOp(call.op), rank)
        return [(row_split(shape[0], size)[rank], *shape[1:]) for shape in shapes]
    if call.kind == "alltoall":
        rows_to_send(shapes[0], None, rank, size)
    return list(shapes)


class _Group:
    """The process set of a call, and how its operations are started."""

    def __init__(self, call: ForeignCall, process_set: ProcessSet) -> None:
        self.call = call
        self.set = process_set
        self.op = ReduceOp(call.op)
        self.blocking = not call.by_name

    @property
    def communicator(self) -> Communicator:
        """Raises ValueError on a rank that is not in the set."""
        return self.set.communicator

    def name(self, index: int, count: int) -> str:
        return self.call.name if count == 1 else member_name(self.call.name, index) or ""


class _Started(ExitStack):
    """At its end, also after an error, the block waits for all operations: the runtime then frees their memory.

    It raises the error of the first operation that failed.
    """

    def add(self, work: Work) -> Work:
        self.callback(work.wait)
        return work


def _rows(work: Work, row: Shape) -> list[int]:
    """The rows of each rank in a finished allgather or alltoall of tensors with rows of this shape."""
    if prod(row):
        return [count // prod(row) for count in work.counts()]
    return list(work.output().cast("q"))


def _check_rows(group: _Group, name: str, rows: Sequence[int]) -> None:
    """Raise CollectiveMismatch on all ranks where their ``rows`` have to be equal and are not."""
    if group.call.equal_rows and len(set(rows)) > 1:
        raise CollectiveMismatch(
            f"rank {world.current().rank}: {group.call.kind}{f' {name!r}' if name else ''}: the ranks have given "
            f"different numbers of rows, {', '.join(map(str, rows))}; shapes of results are fixed before, so all ranks "
            "must give the same shape"
        )


def _output(allocate: Allocate, index: int, shape: Shape, dtype: DType) -> Buffer:
    address = allocate(index, shape)
    if not address and 0 not in shape:
        raise CollectiveError(
            f"rank {world.current().rank}: there is no memory for a result of shape {shape}; where shapes are fixed "
            "before, as in compiled functions, all ranks must give tensors of the same shape"
        )
    return Buffer(address, shape, dtype)


def _like(allocate: Allocate, tensors: Sequence[Buffer]) -> list[Buffer]:
    return [_output(allocate, index, tensor.shape, tensor.dtype) for index, tensor in enumerate(tensors)]


def _integers(values: Sequence[int]) -> Buffer:
    return from_memoryview(array("q", values))


def _put_integers(allocate: Allocate, index: int, values: Sequence[int], dtype: DType) -> None:
    output = _output(allocate, index, (len(values),), dtype)
    copy_bytes(memoryview(array("q" if dtype is DType.INT64 else "i", values)), output)


def _allreduce(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    """The tensors of one dtype form one operation."""
    outputs = _like(allocate, inputs)
    parts: dict[DType, list[int]] = {}
    for index, tensor in enumerate(inputs):
        parts.setdefault(tensor.dtype, []).append(index)
    whole = Call(len(parts))
    with _Started() as started:
        for number, part in enumerate(parts.values()):
            started.add(
                group.communicator.allreduce(
                    [inputs[index] for index in part],
                    [outputs[index] for index in part],
                    op=group.op,
                    prescale=group.call.prescale,
                    postscale=group.call.postscale,
                    name=group.name(number, len(parts)),
                    blocking=group.blocking,
                    call=whole,
                )
            )


def _broadcast(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    root, outputs = group.set.group_rank(group.call.root), _like(allocate, inputs)
    with _Started() as started:
        for index, (tensor, output) in enumerate(zip(inputs, outputs, strict=True)):
            name = group.name(index, len(inputs))
            started.add(group.communicator.broadcast(tensor, output, root, name=name, blocking=group.blocking))


def _allgather(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    whole, works = Call(len(inputs)), []
    with _Started() as started:
        for index, tensor in enumerate(inputs):
            shape = tensor.shape or (1,)
            # Rows without elements have no bytes: gather their number instead.
            sent = Buffer(tensor.address, shape, tensor.dtype) if prod(shape[1:]) else _integers([shape[0]])
            name = group.name(index, len(inputs))
            work = group.communicator.allgather(sent, name=name, blocking=group.blocking, call=whole)
            works.append(started.add(work))
    rows = [_rows(work, tensor.shape[1:]) for work, tensor in zip(works, inputs, strict=True)]
    for index, counts in enumerate(rows):
        _check_rows(group, group.name(index, len(inputs)), counts)
    for index, (tensor, work) in enumerate(zip(inputs, works, strict=True)):
        output = _output(allocate, index, (sum(rows[index]), *tensor.shape[1:]), tensor.dtype)
        if output.count:
            copy_bytes(work.output(), output)
    for index, counts in enumerate(rows if group.call.rows else ()):
        _put_integers(allocate, len(inputs) + index, counts, DType.INT64)


def _reducescatter(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    communicator, whole = group.communicator, Call(len(inputs))
    with _Started() as started:
        for index, tensor in enumerate(inputs):
            check_scatterable(tensor.shape, group.op, communicator.rank)
            rows = row_split(tensor.shape[0], communicator.size)[communicator.rank]
            started.add(
                communicator.reducescatter(
                    tensor,
                    _output(allocate, index, (rows, *tensor.shape[1:]), tensor.dtype),
                    op=group.op,
                    prescale=group.call.prescale,
                    postscale=group.call.postscale,
                    name=group.name(index, len(inputs)),
                    blocking=group.blocking,
                    call=whole,
                )
            )


def _alltoall(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    """``inputs``: a tensor, and the rows for each rank if they differ."""
    communicator, tensor = group.communicator, inputs[0]
    splits = integers_of(inputs[1]) if len(inputs) > 1 else None
    send = rows_to_send(tensor.shape, splits, communicator.rank, communicator.size)
    row = tensor.shape[1:]
    sent, shares = (tensor, send) if prod(row) else (_integers(send), [1] * communicator.size)
    work = communicator.alltoall([sent], shares, name=group.call.name, blocking=group.blocking)
    work.wait()
    rows = _rows(work, row)
    _check_rows(group, group.call.name, [count * communicator.size for count in rows])
    output = _output(allocate, 0, (sum(rows), *row), tensor.dtype)
    if output.count:
        copy_bytes(work.output(), output)
    if group.call.rows:
        _put_integers(allocate, 1, rows, DType.INT32)


def _barrier(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
    group.communicator.barrier(name=group.call.name, blocking=group.blocking).wait()


def _number(value: Callable[[ProcessSet], int]) -> Callable[[_Group, Sequence[Buffer], Allocate], None]:
    """A call whose only result is a number of this rank."""

    def put(group: _Group, inputs: Sequence[Buffer], allocate: Allocate) -> None:
        output = _output(allocate, 0, (), DType.INT32)
        copy_bytes(memoryview(array("i", [value(group.set)])), output)

    return put


_KINDS: dict[str, Callable[[_Group, Sequence[Buffer], Allocate], Any]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "reducescatter": _reducescatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "rank": _number(lambda process_set: process_set.rank()),
    "size": _number(lambda process_set: process_set.size()),
    "local_rank": _number(lambda process_set: local_rank()),
    "local_size": _number(lambda process_set: local_size()),
    "included": _number(lambda process_set: int(process_set.included())),
}
