"""allreduce in all its forms: one tensor or a group, synchronous or not, in place or not, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction, check_process_set, operation_of, reduction_of
from ring_notebook.api.handles import Handle, Waitable, check_name
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.work import Call, Work
from ring_notebook.core.world import current
from ring_notebook.torch.collectives.tensor_arguments import check_compression, check_tensors, checked_list
from ring_notebook.torch.compression import Compression, Compressor
from ring_notebook.torch.devices import StreamWork
from ring_notebook.torch.tensors import buffer_in_place, buffer_of, check_tensor, copy_back, for_core, ordered, reader

if TYPE_CHECKING:
    from ring_notebook import _core


def start(
    tensors: Sequence[Tensor],
    how: Reduction,
    name: str | None,
    *,
    in_place: bool = True,
    blocking: bool = False,
    claim: bool = True,
) -> Handle:
    """Start one allreduce per dtype and device of ``tensors``; `Handle.wait` returns the list of reduced tensors.

    ``claim`` reserves the name until the operation has ended.
    """
    sources = [_buffer(tensor) for tensor in tensors]
    communicator = how.process_set.communicator
    label = check_name(communicator, name) if claim else name or ""
    outputs = list(tensors) if in_place else [torch.empty_like(tensor) for tensor in tensors]
    targets = sources if in_place else [_buffer(output) for output in outputs]
    works: list[Work | StreamWork] = []
    kinds = list(dict.fromkeys(map(_kind, sources)))
    call = Call(len(kinds))
    for part, kind in enumerate(kinds):
        chosen = [place for place, source in enumerate(sources) if _kind(source) == kind]
        work = communicator.allreduce(
            [sources[place] for place in chosen],
            [targets[place] for place in chosen],
            op=how.op,
            prescale=how.prescale,
            postscale=how.postscale,
            name=f"{label}, part {part + 1}" if label and part else label,
            blocking=blocking,
            call=call,
        )
        works.append(ordered(work, sources[chosen[0]].owner))

    def finish() -> list[Tensor]:
        for target, output in zip(targets, outputs, strict=True):
            copy_back(target.owner, output)
        return outputs

    return Handle(communicator, label if claim else "", works, finish)


def start_in_place(
    tensors: Tensor | list[Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
) -> Waitable:
    """`start` of one tensor or a list in place, faster where the reader can read them. The result is ``tensors``."""
    known = _reader(tensors, prescale, postscale)
    if known is not None:
        communicator = _communicator(process_set)
        label = check_name(communicator, name) if name else ""
        work = communicator.start_tensors(known, tensors, op, prescale, postscale, label)
        if work is not None:
            return Handle(communicator, label, (work,), lambda: tensors) if label else work
    handle = start(_checked(tensors), reduction_of(None, op, prescale, postscale, process_set), name)
    return handle if isinstance(tensors, list) else handle.only()


def reduce_now(
    tensors: Tensor | list[Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    in_place: bool = True,
) -> Any:
    """`start` and `Handle.wait`, without the cost of a handle where the reader can read the tensors.

    Returns the reduced tensor, or a list of them for a list; in place these are ``tensors``.
    """
    # Every call of a Python function counts here.
    known = _reader(tensors, prescale, postscale)
    if known is not None:
        communicator = _communicator(process_set)
        label = check_name(communicator, name) if name else ""
        outputs = tensors if in_place else _like(tensors)
        if communicator.allreduce_tensors(known, tensors, outputs, op, prescale, postscale, label):
            return outputs
    how = reduction_of(None, op, prescale, postscale, process_set)
    reduced = start(_checked(tensors), how, name, in_place=in_place, blocking=True).wait()
    return reduced if isinstance(tensors, list) else reduced[0]


def _reader(tensors: Tensor | list[Tensor], prescale: float, postscale: float) -> _core.TensorReader | None:
    """The reader for these tensors; None for arguments that must be checked first."""
    plain = isinstance(tensors, (Tensor, list)) and type(prescale) is float and type(postscale) is float
    return reader() if plain else None


def _like(tensors: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    if isinstance(tensors, list):
        return [torch.empty_like(tensor) for tensor in tensors]
    return torch.empty_like(tensors)


def _communicator(process_set: ProcessSet) -> Communicator:
    if process_set is global_process_set:
        return current().communicator
    check_process_set(process_set)
    return process_set.communicator


def _checked(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    if not isinstance(tensors, list):
        return [tensors]
    for tensor in tensors:
        check_tensor(tensor, "grouped_allreduce")
    return tensors


def _buffer(tensor: Tensor) -> Buffer:
    """Buffer over ``tensor``, or over a copy of it (its ``owner``) where the core cannot work on it in place."""
    buffer = buffer_in_place(tensor)
    if buffer is None:
        check_tensor(tensor, "allreduce")
        buffer = buffer_of(for_core(tensor))
    return buffer


def _kind(buffer: Buffer) -> tuple[DType, Device, int]:
    """The properties that all buffers of one operation share."""
    return buffer.dtype, buffer.device, buffer.index


def _differentiable(tensors: Sequence[Tensor], how: Reduction, name: str | None) -> list[Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_Allreduce.apply(how, name, *tensors))  # type: ignore[no-untyped-call]
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return [reduce_now(tensors[0], *how, name, False)]
    result: list[Tensor] = start(tensors, how, name, in_place=False, blocking=True).wait()
    return result


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Reduction, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        return tuple(start(tensors, how, name, in_place=False, blocking=True).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(
                f"an allreduce with op={ctx.how.op.name.capitalize()} has no gradient; use Average or Sum, or detach "
                "the tensor"
            )
        return (None, None, *_differentiable(grads, ctx.how, None))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A new tensor: ``tensor`` reduced over all ranks. All give the same shape and dtype (Horovod: ``allreduce``).

    ``op`` is Average (default), Sum, Min, Max, Product or Adasum; ``average=False`` is Horovod's old way to say Sum.
    The factors scale before and after: integers in float64 and truncated, float16 and bfloat16 in float32. The
    average of integers truncates. Differentiable for Average and Sum: the gradient is reduced in the same way.
    Raises CollectiveMismatch on every rank when the ranks disagree.
    """
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_compression(compression)
    wire, ctx = compression.compress(tensor)
    reduced: Tensor = compression.decompress(_differentiable([wire], how, name)[0], ctx)
    return reduced


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce` into a new tensor, which `synchronize` returns. Do not change ``tensor`` until then."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    return start([tensor], how, name, in_place=False).only()


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place; returns ``tensor``."""
    if not isinstance(tensor, Tensor):
        check_tensor(tensor, "allreduce")
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    reduced: Tensor = reduce_now(tensor, how, prescale_factor, postscale_factor, process_set, name)
    return reduced


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start `allreduce` in place; `synchronize` returns ``tensor``."""
    if not isinstance(tensor, Tensor):
        check_tensor(tensor, "allreduce")
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    return start_in_place(tensor, how, prescale_factor, postscale_factor, process_set, name)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """New tensors: each of ``tensors`` reduced as by `allreduce`, all of them (per dtype) in one fused operation."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_tensors(tensors, "grouped_allreduce")
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable([wire for wire, _ in pairs], how, name)
    return [compression.decompress(wire, ctx) for wire, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce` into new tensors; `synchronize` returns their list."""
    how = reduction_of(average, op, prescale_factor, postscale_factor, process_set)
    check_tensors(tensors, "grouped_allreduce")
    return start(tensors, how, name, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place; returns ``tensors`` as a list."""
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    given = checked_list(tensors, "grouped_allreduce")
    reduced: list[Tensor] = reduce_now(given, how, prescale_factor, postscale_factor, process_set, name)
    return reduced


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start `grouped_allreduce` in place; `synchronize` returns ``tensors`` as a list."""
    how = op if type(op) is ReduceOp and average is None else operation_of(average, op)
    given = checked_list(tensors, "grouped_allreduce")
    return start_in_place(given, how, prescale_factor, postscale_factor, process_set, name)
