"""Tensors on a device, as the core takes them: their address, their device, and the stream that they are on.

A kind of device is an entry here. What has none, or no driver on this machine, travels through CPU memory. Logged
tensors of one number are copied to the host in the background, and read once the copy is there.
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
    """Memory of a GPU under the protocol by which torch takes it over."""

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
    """Describe the tensors whose ``device.type`` is ``name``; ``torch.NAME`` has the functions of ``torch.cuda``."""
    _kinds[name] = kind


def kind_of(tensor: Tensor) -> DeviceKind | None:
    """What describes this tensor to the core; None where the core cannot reach its memory."""
    kind = _kinds.get(tensor.device.type)
    return kind if kind is not None and has_devices() else None


def has_streams(tensor: Tensor) -> bool:
    """Whether the tensor's device works through streams that the host need not wait for."""
    return tensor.device.type in _kinds


def accelerator() -> str | None:
    """The type of device that this process trains on: the first that torch finds; None where it finds none."""
    return next((name for name in _kinds if hasattr(torch, name) and getattr(torch, name).is_available()), None)


def address_of(tensor: Tensor) -> int:
    """Address of the first element, in the memory that the tensor lies in."""
    kind = _kinds.get(tensor.device.type)
    return tensor.data_ptr() if kind is None else kind.address_of(tensor)


def device_buffer(tensor: Tensor, dtype: DType, kind: DeviceKind) -> Buffer:
    """Buffer over a contiguous tensor on a device, ordered behind what this thread has queued there so far."""
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
    """An operation on a device: what the thread that waits for it queues afterwards sees the result."""

    __slots__ = ("_kind", "_like", "_work")

    def __init__(self, work: Work, kind: DeviceKind, like: Tensor) -> None:
        self._work = work
        self._kind = kind
        self._like = like  # a tensor of the device

    def wait(self) -> None:
        """Return when the operation is queued, with this thread's stream waiting for it. Raises its error."""
        self._work.wait(stream=self._kind.stream_of(self._like))

    def done(self) -> bool:
        """Whether the result is there (also when the operation failed)."""
        return self._work.done()

    def counts(self) -> list[int]:
        """Elements that came from each rank."""
        return self._work.counts()

    def tensor(self, shape: Sequence[int]) -> Tensor:
        """What an allgather or alltoall has received, on the device of what it sent."""
        like = self._like
        if not prod(shape):
            return like.new_empty(tuple(shape))
        memory = self._work.device_output()
        received = self._kind.from_memory(memory, memory.nbytes, like.device)
        return received.view(like.dtype).view(tuple(shape))


class LoggedTensor:
    """The value that a tensor has where its stream is now; the host does not wait for it."""

    __slots__ = ("_copy", "_event")

    def __init__(self, tensor: Tensor) -> None:
        module = getattr(torch, tensor.device.type)
        # Torch takes pinned memory for what nobody waits for: from pageable memory a copy would wait.
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
    """Begin to copy ``value``, a tensor of one number; None for all but tensors of a device that has streams.

    Raises RuntimeError while a CUDA graph is captured, whose replays would log nothing.
    """
    if not isinstance(value, Tensor) or not has_streams(value):
        return None
    if getattr(torch, value.device.type).is_current_stream_capturing():
        raise RuntimeError("log: a CUDA graph is being captured; log the tensor after the graph's replay")
    return LoggedTensor(value)
