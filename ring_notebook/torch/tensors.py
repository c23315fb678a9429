"""torch tensors as Buffers and back: dtypes, contiguity, and the copies that other tensors need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_notebook.api.process_sets import global_process_set
from ring_notebook.core.buffers import Buffer, DType
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.core.work import Work
from ring_notebook.torch.devices import StreamWork, device_buffer, kind_of
from ring_notebook.torch_private import private

if TYPE_CHECKING:
    from ring_notebook import _core


_STRIDED = torch.strided
_DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.name.lower()): dtype for dtype in DType}
_TORCH_DTYPES = {dtype: known for known, dtype in _DTYPES.items()}
_NUMBERED = tuple(DType)
_PLAIN = (torch.nn.Parameter, Tensor)
_multiply_each, _copy_each = private("multiply_each"), private("copy_each")


def check_tensor(tensor: Any, operation: str) -> None:
    """Raise TypeError unless ``tensor`` is a dense torch tensor of a dtype that the core supports."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{operation} takes torch tensors, got {type(tensor).__name__}; for other objects use "
            "broadcast_object or allgather_object"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{operation} takes dense tensors, got {tensor.layout}; use sparse_allreduce_async")
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{operation} cannot handle {tensor.dtype}; convert the tensor to one of {known}")
    if not _has_values(tensor):
        raise TypeError(f"{operation} takes tensors with values; this {type(tensor).__name__} has no memory of its own")


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not (tensor.is_cpu and tensor.numel() and tensor.data_ptr() == 0)


def can_reduce(dtype: torch.dtype) -> bool:
    """Whether the core has kernels for elements of this type."""
    return dtype in _DTYPES


def moved_view(tensor: Tensor) -> Tensor:
    """A view of the same memory in a type that the core can move: `real_view`, or bytes for other types of one byte."""
    viewed = real_view(tensor)
    is_bytes = viewed.dtype not in _DTYPES and viewed.dtype.itemsize == 1 and viewed.layout is _STRIDED
    return viewed.view(torch.uint8) if is_bytes else viewed


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a share of its values (a DTensor, of FSDP2), so that there is nothing to compare."""
    return hasattr(tensor, "device_mesh")


def parts_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors in which the values of ``tensor`` lie, by name; of a plain one itself.

    A tensor that is made of others, such as a quantized one of torchao, has them as its parts. A parameter of another
    class may keep more tensors as attributes, such as the scales of a quantized weight of bitsandbytes.
    """
    if type(tensor) in _PLAIN:
        yield name, tensor
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for attribute in flatten()[0]:
            yield from parts_of(f"{name}.{attribute}", getattr(tensor, attribute))
        return
    yield name, tensor
    yield from _attributes(name, tensor, {id(tensor)})


def _attributes(name: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for attribute, value in sorted(getattr(owner, "__dict__", {}).items()):
        if id(value) in seen or isinstance(value, torch.nn.Module | type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                yield from parts_of(f"{name}.{attribute}", value)
        elif not callable(value):
            yield from _attributes(f"{name}.{attribute}", value, seen)


def moved_as(dtype: torch.dtype) -> DType:
    """The core's type for operations that only move elements of this type: bytes, if the core lacks the type."""
    return _DTYPES.get(dtype, DType.UINT8)


def dtype_of(tensor: Tensor) -> DType:
    """The core's element type of a tensor. Raises TypeError where the core lacks it."""
    check_tensor(tensor, "allreduce")
    return _DTYPES[tensor.dtype]


def on_host(tensor: Tensor) -> Tensor:
    """``tensor`` itself where the core can use it in place, else a contiguous copy in CPU memory."""
    if _is_in_place(tensor):
        return tensor
    return tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True).resolve_neg()


def host_target(tensor: Tensor) -> Tensor:
    """As `on_host`, for a tensor that an operation overwrites: nothing is copied. `copy_back` brings the result."""
    return tensor if _is_in_place(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _is_in_place(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def for_core(tensor: Tensor) -> Tensor:
    """``tensor`` itself where the core can use it in place, else a contiguous copy.

    The copy is on the tensor's device if the core can use that, else in CPU memory.
    """
    if tensor.is_cpu or kind_of(tensor) is None:
        return on_host(tensor)
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def real_view(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of real numbers, with one more dimension of 2; any other tensor itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def in_memory_order(tensor: Tensor) -> Tensor:
    """A contiguous view of a tensor that fills its memory in another order (channels last, say); else ``tensor``."""
    if tensor.is_contiguous():
        return tensor
    view = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return view if view.is_contiguous() else tensor


def copy_back(host: Tensor, tensor: Tensor) -> None:
    """Copy a result from the copy of `for_core` back into ``tensor``; does nothing where there was no copy."""
    if host is not tensor:
        with torch.no_grad():
            tensor.copy_(host)


@lru_cache(maxsize=2)
def reader(*, flat: bool = False) -> _core.TensorReader:
    """The reader of plain tensors, in nanoseconds each. ``flat``: equal numbers of elements match, in any shapes."""
    return core.TensorReader((Tensor, torch.nn.Parameter), Tensor.is_neg, flat)


def buffer_in_place(tensor: Any) -> Buffer | None:
    """Buffer over a tensor that passes `check_tensor` and needs no copy; None for all others."""
    if (found := reader().read(tensor)) is not None:
        return Buffer(found[0], found[1], _NUMBERED[found[2]], tensor)
    if not isinstance(tensor, Tensor) or tensor.layout is not _STRIDED:
        return None
    dtype = _DTYPES.get(tensor.dtype)
    # The negative bit is not in the tensor's memory (Tensor.is_neg).
    if dtype is None or not tensor.is_contiguous() or tensor.is_neg():
        return None
    if not tensor.is_cpu:
        kind = kind_of(tensor)
        return None if kind is None else device_buffer(tensor, dtype, kind)
    address = tensor.data_ptr()
    if address == 0 and tensor.numel():
        return None
    return Buffer(address, tensor.shape, dtype, tensor)


def buffer_of(tensor: Tensor) -> Buffer:
    """Buffer over a contiguous tensor that the core can reach; it keeps the tensor alive."""
    if not tensor.is_cpu:
        kind = kind_of(tensor)
        assert kind is not None
        return device_buffer(tensor, _DTYPES[tensor.dtype], kind)
    return Buffer(tensor.data_ptr(), tensor.shape, _DTYPES[tensor.dtype], tensor)


def equal_parts(output: Tensor, ranks: int, dtype: torch.dtype) -> list[Buffer]:
    """The part of ``output`` for each rank; empty where the core cannot write equal parts of ``dtype`` there."""
    whole = buffer_in_place(output.detach()) if output.is_cpu else None
    if whole is None or whole.count % ranks or output.dtype != dtype:
        return []
    count = whole.count // ranks
    step = count * whole.dtype.itemsize
    return [Buffer(whole.address + rank * step, (count,), whole.dtype, output) for rank in range(ranks)]


def from_bytes(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Tensor of ``shape`` over ``data`` without a copy; it keeps the memory alive."""
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(tuple(shape))


def ordered(work: Work, tensor: Tensor) -> Work | StreamWork:
    """``work`` in the form that a `Handle` waits for; ``tensor``, from `for_core`, says whether it is on a device."""
    kind = None if tensor.is_cpu else kind_of(tensor)
    return work if kind is None else StreamWork(work, kind, tensor)


def received(work: Work | StreamWork, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The result of an allgather or alltoall, with the dtype and on the device of ``like``."""
    if isinstance(work, StreamWork):
        return work.tensor(shape)
    return from_bytes(work.output(), like.dtype, shape).to(like.device)


class TorchAdapter:
    """torch's tensors for `ring_notebook.api`: see `TensorAdapter`."""

    name = "torch"

    def can_send(self, value: Any) -> bool:
        """Whether ``value`` is a plain dense tensor without gradient history. Raises ValueError for a sharded one."""
        if type(value) not in _PLAIN and isinstance(value, Tensor) and is_sharded(value):
            raise ValueError(
                f"rank {global_process_set.rank()}: broadcast_object: a tensor of shape {list(value.shape)} is sharded "
                "over the ranks (a DTensor), and one rank's share is not that of the others; send full_tensor() of it, "
                "which all ranks call"
            )
        return (
            type(value) is Tensor
            and not value.requires_grad
            and value.layout is torch.strided
            and value.dtype in _DTYPES
            and _has_values(value)
        )

    def buffer_of(self, tensor: Any) -> Buffer:
        """Buffer over ``tensor``, or over a copy of it that is contiguous and in CPU memory."""
        return buffer_of(on_host(tensor))

    def empty(self, dtype: DType, shape: Sequence[int]) -> Tensor:
        """As `torch.empty`, in CPU memory."""
        return torch.empty(tuple(shape), dtype=_TORCH_DTYPES[dtype], device="cpu")


def multiply_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place, on a device with as few launches as possible."""
    if _multiply_each is not None:
        _multiply_each(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, on a device with as few launches as possible."""
    if _copy_each is not None:
        _copy_each(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of ``size`` (as in `torch.empty`) in ring memory, not initialized; freed with its last view.

    ``dtype`` defaults to torch's default. Raises ValueError for a negative dimension, and OutOfRingMemoryError when the
    machine, or the process's memory limit, has too little memory left.
    """
    if any(isinstance(length, int) and length < 0 for length in size):
        raise ValueError(f"empty: dimensions must not be negative, got {size}")
    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return empty_in(global_process_set.communicator, torch.Size(shape), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def empty_in(communicator: Communicator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`empty` for the ranks of ``communicator``."""
    return from_bytes(memoryview(communicator.empty(prod(shape) * dtype.itemsize)), dtype, shape)
