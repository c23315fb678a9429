"""How an allreduce of tensors starts: on their own memory, or on copies that are written back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring_notebook.api.arguments import check_process_set, check_scale
from ring_notebook.api.handles import Handle, Waitable, check_name
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.api.reduction import Reduction, reduction_of
from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.work import Call, Work
from ring_notebook.core.world import current
from ring_notebook.torch.devices import StreamWork
from ring_notebook.torch.tensors import buffer_in_place, buffer_of, check_tensor, copy_back, for_core, ordered, reader

__all__ = ["reduce_list_now", "reduce_now", "start", "start_in_place", "start_list_in_place"]


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

    ``claim`` keeps others from using the name meanwhile.
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
    tensor: Tensor, op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet, name: str | None
) -> Waitable:
    """`start` of one tensor in place, in less time. The result is ``tensor``."""
    if isinstance(tensor, Tensor):
        handle = _start(tensor, op, prescale, postscale, process_set, name)
        if handle is not None:
            return handle
    return start([tensor], _reduction(op, prescale, postscale, process_set), name).only()


def start_list_in_place(
    tensors: list[Tensor], op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet, name: str | None
) -> Waitable:
    """`start` of a list in place, in less time. The result is ``tensors``."""
    handle = _start(tensors, op, prescale, postscale, process_set, name)
    if handle is not None:
        return handle
    return start(_checked(tensors), _reduction(op, prescale, postscale, process_set), name)


def _start(
    tensors: Tensor | list[Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
) -> Waitable | None:
    """None for what takes `start`, where it is checked too."""
    known = reader()
    if known is None or type(prescale) is not float or type(postscale) is not float:
        return None
    communicator = current().communicator if process_set is global_process_set else _communicator(process_set)
    if not name:
        return communicator.start_tensors(known, tensors, op, prescale, postscale, "")
    label = check_name(communicator, name)
    work = communicator.start_tensors(known, tensors, op, prescale, postscale, label)
    return None if work is None else Handle(communicator, label, (work,), lambda: tensors)


def _communicator(process_set: ProcessSet) -> Communicator:
    check_process_set(process_set)
    return process_set.communicator


def _reduction(op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet) -> Reduction:
    return reduction_of(None, op, prescale, postscale, process_set)


def reduce_list_now(
    tensors: list[Tensor], op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet, name: str | None
) -> list[Tensor]:
    """`start` and `Handle.wait` for a list in place, in less time."""
    known = reader()
    if known is not None and type(prescale) is float and type(postscale) is float:
        communicator = current().communicator if process_set is global_process_set else _communicator(process_set)
        label = check_name(communicator, name) if name else ""
        if communicator.allreduce_tensors(known, tensors, tensors, op, prescale, postscale, label):
            return tensors
    how = _reduction(op, prescale, postscale, process_set)
    result: list[Tensor] = start(_checked(tensors), how, name, blocking=True).wait()
    return result


def _checked(tensors: list[Tensor]) -> list[Tensor]:
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
    """What the buffers of one operation have in common."""
    return buffer.dtype, buffer.device, buffer.index


def reduce_now(
    tensor: Tensor,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
    in_place: bool,
) -> Tensor:
    """`start` and `Handle.wait` for one tensor, which is reduced in less time than a handle takes where it is small."""
    # Every call of a function of Python counts here.
    communicator = current().communicator if process_set is global_process_set else _communicator(process_set)
    if type(prescale) is not float or type(postscale) is not float:
        prescale, postscale = check_scale(prescale, "prescale_factor"), check_scale(postscale, "postscale_factor")
    label = check_name(communicator, name) if name else ""
    known = reader() if in_place and isinstance(tensor, Tensor) else None
    if known is not None and communicator.allreduce_tensors(known, tensor, tensor, op, prescale, postscale, label):
        return tensor
    source = buffer_in_place(tensor)
    if source is None:
        how = Reduction(op, prescale, postscale, process_set)
        reduced: list[Tensor] = start([tensor], how, name, in_place=in_place, blocking=True).wait()
        return reduced[0]
    output = tensor if in_place else torch.empty_like(tensor)
    communicator.allreduce_now(
        source,
        source if in_place else buffer_of(output),
        op,
        prescale,
        postscale,
        label,
    )
    return output
