"""Describes tensors on devices to the core: address, device and stream.

Each kind of device is an entry here. Tensors of other kinds, or without a driver on this machine, go through CPU
memory. Logged numbers are copied to the host in the background, and read when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.native import has_devices
from ring_notebook.core.work import Work


class DeviceKind(Protocol):
    """How tensors of one kind of device are described to the core, and made from its memory."""

    device: Device

    def address_of(self, tensor: Tensor) -> int:
        """Address of the first element in the memory of the device."""

    def device_of(self, tensor: Tensor) -> int:
        """Number of the device among those that this process sees."""

    def stream_of(self, tensor: Tensor) -> int:
        """Handle of the stream on which this thread works on the tensor's device now."""

    def from_memory(self, memory: Any, nbytes: int, device: torch.device) -> Tensor:
        """A tensor of ``nbytes`` uint8 over ``memory.address`` without a copy; it keeps ``memory`` alive."""


class _Cuda:
    """NVIDIA's GPUs."""

    device = Device.CUDA

    def address_of(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def device_of(self, tensor: Tensor) -> int:
        return tensor.get_device()

    def stream_of(self, tensor: Tensor) -> int:
        stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
        return stream

    def from_memory(self, memory: Any, nbytes: int, device: torch.device) -> Tensor:
        return torch.as_tensor(_CudaArray(memory, nbytes), device=device)


class _CudaArray:
    """Memory of a GPU with the protocol ``__cuda_array_interface__``, from which torch makes a tensor."""

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


_kinds: dict[str, DeviceKind] = {"cuda": _Cuda()}


def register_device(name: str, kind: DeviceKind) -> None:
    """Register ``kind`` for tensors whose ``device.type`` is ``name``; ``torch.NAME`` has the API of ``torch.cuda``."""
    _kinds[name] = kind


def kind_of(tensor: Tensor) -> DeviceKind | None:
    """The `DeviceKind` of this tensor; None where the core cannot reach its memory."""
    kind = _kinds.get(tensor.device.type)
    return kind if kind is not None and has_devices() else None


def has_streams(tensor: Tensor) -> bool:
    """Whether the tensor's device has streams, so that the host need not wait for it."""
    return tensor.device.type in _kinds


def accelerator() -> str | None:
    """The type of device that this process trains on: the first that torch finds, or None."""
    return next((name for name in _kinds if hasattr(torch, name) and getattr(torch, name).is_available()), None)


def address_of(tensor: Tensor) -> int:
    """Address of the first element, in CPU or device memory."""
    kind = _kinds.get(tensor.device.type)
    return tensor.data_ptr() if kind is None else kind.address_of(tensor)


def device_buffer(tensor: Tensor, dtype: DType, kind: DeviceKind) -> Buffer:
    """Buffer over a contiguous tensor on a device; the operation runs after the work that this thread has queued."""
    return Buffer(
        kind.address_of(tensor),
        tensor.shape,
        dtype,
        tensor,
        kind.device,
        kind.device_of(tensor),
        kind.stream_of(tensor),
    )


class StreamWork:
    """An operation on a device: work that its waiting thread queues after `wait` sees the result."""

    __slots__ = ("_kind", "_like", "_work")

    def __init__(self, work: Work, kind: DeviceKind, like: Tensor) -> None:
        self._work = work
        self._kind = kind
        self._like = like  # a tensor on the device

    def wait(self) -> None:
        """Return when the operation is queued and this thread's stream waits for it. Raises its error."""
        self._work.wait(stream=self._kind.stream_of(self._like))

    def done(self) -> bool:
        """Whether the operation has ended, also by an error."""
        return self._work.done()

    def counts(self) -> list[int]:
        """The number of elements from each rank."""
        return self._work.counts()

    def tensor(self, shape: Sequence[int]) -> Tensor:
        """The result of an allgather or alltoall, on the device of its input."""
        like = self._like
        if not prod(shape):
            return like.new_empty(tuple(shape))
        memory = self._work.device_output()
        received = self._kind.from_memory(memory, memory.nbytes, like.device)
        return received.view(like.dtype).view(tuple(shape))


class LoggedTensor:
    """The value of a tensor at this point of its stream; the host does not wait for it."""

    __slots__ = ("_copy", "_event")

    def __init__(self, tensor: Tensor) -> None:
        module = getattr(torch, tensor.device.type)
        # With non_blocking, torch copies into pinned memory: a copy into pageable memory would wait.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._event = module.Event()
        self._event.record(module.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether the device has written the copy. Raises RuntimeError where the device has failed."""
        done: bool = self._event.query()
        return done

    def number(self) -> float:
        """The value, once it has arrived."""
        return float(self._copy)


def begin_copy(value: Any) -> LoggedTensor | None:
    """Begin to copy ``value``, a tensor of one number; None unless it is on a device with streams.

    Raises RuntimeError while a CUDA graph is captured, because its replays would log nothing.
    """
    if not isinstance(value, Tensor) or not has_streams(value):
        return None
    if getattr(torch, value.device.type).is_current_stream_capturing():
        raise RuntimeError("log: a CUDA graph is being captured; log the tensor after the graph's replay")
    return LoggedTensor(value)
