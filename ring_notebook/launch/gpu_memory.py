"""A little memory of a GPU, from the CUDA driver itself, or of the host: for a self-check that loads no framework."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.work import Work
from ring_notebook.errors import RingError

__all__ = ["GpuMemory", "HostMemory"]

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostMemory:
    """Memory of this process, with what `GpuMemory` has."""

    def buffer(self, data: bytes, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A buffer with these values."""
        owner = ctypes.create_string_buffer(data, len(data))
        return Buffer(ctypes.addressof(owner), shape, dtype, owner)

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at ``address``."""
        return ctypes.string_at(address, nbytes)

    def output(self, work: Work) -> bytes:
        """What an allgather or alltoall has received."""
        return bytes(work.output())


class GpuMemory:
    """Memory and one stream of GPU ``index``, by the driver library at ``path``. Used from one thread.

    Raises RingError that names the call where the driver reports an error.
    """

    def __init__(self, path: str, index: int) -> None:
        self._driver = ctypes.CDLL(path)
        self._index = index
        self._callbacks: list[Any] = []
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        # The one that CUDA's run time, and with it every framework and NCCL, uses.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self._stream = stream.value or 0

    def buffer(self, data: bytes, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A buffer on the GPU with these values; its memory lasts as long as the process."""
        address = ctypes.c_uint64()
        stream = ctypes.c_void_p(self._stream)
        self._call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(max(1, len(data))), stream)
        self._call("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(len(data)), stream)
        self._call("cuStreamSynchronize", stream)
        return Buffer(address.value, shape, dtype, None, Device.CUDA, self._index, self._stream)

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at ``address`` once the stream has come to an end."""
        data = ctypes.create_string_buffer(nbytes)
        stream = ctypes.c_void_p(self._stream)
        self._call("cuMemcpyDtoHAsync_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), stream)
        self._call("cuStreamSynchronize", stream)
        return data.raw

    def output(self, work: Work) -> bytes:
        """What an allgather or alltoall has received."""
        received = work.device_output()
        return self.read(received.address, received.nbytes)

    def call(self, function: Callable[[], None]) -> None:
        """Queue ``function`` on the stream: what is queued afterwards waits for its return."""
        callback = _HOST_FUNCTION(lambda _: function())
        self._callbacks.append(callback)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(self._stream), callback, None)

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._driver, name)(*arguments):
            raise RingError(f"the CUDA driver reports error {result} from {name}")
