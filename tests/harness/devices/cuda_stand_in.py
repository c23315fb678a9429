"""The fake CUDA driver, which executes the copies of the pretended device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["CudaStandIn"]

_NOT_READY = 600
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class CudaStandIn:
    """The driver at ``path``; device addresses are host addresses. Implements `Driver`."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._functions: list[object] = []
        self._context = ctypes.c_void_p()
        self._of_this_thread = threading.local()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0)

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        return made.value or 0

    def event(self) -> int:
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), 2)
        return made.value or 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        handles = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        self._call("cuMemcpyDtoDAsync_v2", *handles)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def done(self, event: int) -> bool:
        result: int = self._library.cuEventQuery(ctypes.c_void_p(event))
        if result not in (0, _NOT_READY):
            raise RuntimeError(f"cuEventQuery: error {result}")
        return result == 0

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def hold(self, stream: int) -> Callable[[], None]:
        released = threading.Event()
        function = _HOST_FUNCTION(lambda _: bool(released.wait()) and None)
        self._functions.append(function)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(stream), function, None)
        return released.set

    def capture(self, stream: int, on: bool) -> None:
        self._library.fake_cuda_capture(ctypes.c_void_p(stream), int(on), 0)

    def _call(self, name: str, *arguments: object) -> None:
        if not hasattr(self._of_this_thread, "has_context"):  # as torch has it in every thread that uses the device
            self._library.cuCtxPushCurrent_v2(self._context)
            self._of_this_thread.has_context = True
        if result := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: error {result}")
