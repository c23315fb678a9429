"""The fake driver, the fake NCCL and the fake NVML: compiled once, loaded by the core, and controlled by tests."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from native.values import Tensor, encode
from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.native import core

__all__ = [
    "CUDA",
    "NCCL",
    "NVML",
    "FakeDevice",
    "aborts",
    "connections",
    "copies_under_way",
    "devices",
    "ended_late",
    "environment",
    "knobs",
]

HERE = Path(__file__).parent
BUILT = Path(__file__).parents[3] / "build" / "fakes"
_compiling = threading.Lock()
"""Ranks as threads ask at once."""

FLAGS = ["-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-Wall", "-Wextra"]


def _compiled(name: str, *linked: Path) -> Path:
    """The library made of ``name``.cpp, by its content: sessions that run at once, and later ones, share it."""
    source = HERE / f"{name}.cpp"
    sources = [path.read_bytes() for path in (source, *sorted(HERE.glob("*.hpp")))]
    digest = hashlib.sha256(b"".join([*sources, *(str(one).encode() for one in linked)])).hexdigest()[:16]
    library = BUILT / f"lib{name}-{digest}.so"
    with _compiling:
        if library.exists():
            return library
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        compiler = [shutil.which("ccache") or "", os.environ.get("CXX", "c++")]
        command = [*filter(None, compiler), *FLAGS, str(source), "-o", str(unfinished), *map(str, linked), "-lpthread"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


@lru_cache(maxsize=1)
def CUDA() -> Path:  # noqa: N802
    """The fake driver."""
    return _compiled("fake_cuda")


@lru_cache(maxsize=1)
def NVML() -> Path:  # noqa: N802
    """A folder for LD_LIBRARY_PATH with the fake management library under the name by which it is looked for."""
    library = _compiled("fake_nvml")
    folder = library.with_suffix(".path")
    folder.mkdir(exist_ok=True)
    link = folder / "libnvidia-ml.so.1"
    with suppress(FileExistsError):
        link.symlink_to(library)
    return folder


@lru_cache(maxsize=1)
def NCCL() -> Path:  # noqa: N802
    """The fake NCCL, which enqueues its kernels on streams of the fake driver."""
    return _compiled("fake_nccl", CUDA())


def environment() -> dict[str, str]:
    """What has the ranks of a launched job use the fakes."""
    return {"RING_CUDA_LIBRARY": str(CUDA()), "RING_NCCL_LIBRARY": str(NCCL())}


def devices(**settings: Any) -> Any:
    """The devices of a rank, with these settings: arguments of the native ``Devices``."""
    return core.Devices(cuda_library=str(CUDA()), nccl_library=str(NCCL()), **settings)


@lru_cache(maxsize=1)
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    cuda, nccl = ctypes.CDLL(str(CUDA())), ctypes.CDLL(str(NCCL()))
    cuda.fake_cuda_fill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_long]
    cuda.fake_cuda_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    cuda.fake_cuda_hold.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    cuda.fake_cuda_synchronize.argtypes = [ctypes.c_void_p]
    cuda.fake_cuda_capture.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    nccl.fake_nccl_connections.restype = nccl.fake_nccl_ended_late.restype = ctypes.c_long
    nccl.fake_nccl_aborts.restype = ctypes.c_long
    cuda.fake_cuda_allocated.restype = cuda.fake_cuda_copies.restype = ctypes.c_long
    cuda.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    return cuda, nccl


def connections() -> int:
    """Communicators of NCCL that this process has begun to connect so far."""
    return int(_libraries()[1].fake_nccl_connections())


def aborts() -> int:
    """How often this process has aborted communicators of NCCL."""
    return int(_libraries()[1].fake_nccl_aborts())


def copies_under_way() -> int:
    """Copies of this process from and to pinned host memory that have not ended."""
    return int(_libraries()[0].fake_cuda_copies())


def ended_late() -> int:
    """Kernels of this process that have ended behind their abort (``nccl_ends_late_us``)."""
    return int(_libraries()[1].fake_nccl_ended_late())


def _set(name: str, value: int) -> None:
    library, knob = name.split("_", 1)
    cuda, nccl = _libraries()
    (cuda.fake_cuda_set if library == "cuda" else nccl.fake_nccl_set)(knob.encode(), ctypes.c_long(value))


_USUAL = {"cuda_devices": 8, "nccl_version": 22907, "nccl_launch_us": 300, "nccl_deadlock_ms": 20000}


@contextmanager
def knobs(**values: int) -> Iterator[None]:
    """Settings of the fakes in this process, by the library's name and theirs: ``nccl_wrong=1``."""
    for name, value in values.items():
        _set(name, value)
    try:
        yield
    finally:
        for name in values:
            _set(name, _USUAL.get(name, 0))


class FakeDevice:
    """What a framework does with a device: a stream, kernels on it, tensors."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cuda, _ = _libraries()
        handle = ctypes.c_void_p()
        self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(index + 1))
        self._cuda.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0)
        self.stream: int = handle.value or 0

    def tensor(self, values: Any, dtype: DType, owner: Any = None) -> Tensor:
        """A tensor on the device that holds ``values`` now; look at it after `synchronize`."""
        array = np.ascontiguousarray(encode(np.asarray(values), dtype)).reshape(np.shape(values))
        buffer = Buffer(
            array.ctypes.data,
            array.shape,
            dtype,
            array if owner is None else owner,
            device=Device.CUDA,
            index=self.index,
            stream=self.stream,
        )
        return Tensor(array, buffer)

    def fill(self, tensor: Tensor, value: float, microseconds: int = 0) -> None:
        """Launch a kernel that fills a float32 tensor after so many microseconds."""
        self._cuda.fake_cuda_fill(self.stream, tensor.array.ctypes.data, tensor.array.size, value, microseconds)

    def hold_until_abort(self) -> None:
        """Launch a kernel that runs until NCCL aborts, so that no kernel behind it or beyond NCCL ends well."""
        before = aborts()
        self.hold(until=lambda: aborts() > before)

    def hold(self, until: Callable[[], bool]) -> None:
        """Launch a kernel that runs until ``until()``, which a thread asks for as long as it is not so."""
        over = ctypes.c_int(0)
        self._cuda.fake_cuda_hold(self.stream, ctypes.byref(over))

        def watch() -> None:
            while not until():
                time.sleep(0.002)
            over.value = 1

        threading.Thread(target=watch, daemon=True).start()

    def copy(self, to: Tensor, tensor: Tensor) -> None:
        """Launch a kernel that copies a tensor."""
        self._cuda.fake_cuda_copy(self.stream, to.array.ctypes.data, tensor.array.ctypes.data, to.array.nbytes)

    def read(self, tensor: Tensor) -> Any:
        """The values that a kernel sees that is launched now."""
        into = np.empty_like(tensor.array)
        self._cuda.fake_cuda_copy(self.stream, into.ctypes.data, tensor.array.ctypes.data, into.nbytes)
        self.synchronize()
        return Tensor(into, tensor.buffer).values

    def bytes_at(self, address: int, count: int) -> bytes:
        """The same, of memory."""
        into = ctypes.create_string_buffer(max(count, 1))
        self._cuda.fake_cuda_copy(self.stream, into, address, count)
        self.synchronize()
        return into.raw[:count]

    def synchronize(self) -> None:
        """Return when what has been launched is done."""
        self._cuda.fake_cuda_synchronize(self.stream)

    def capture(self, on: bool) -> bool:
        """Begin or end a graph of what is launched on the stream, in the global mode; whether it is a good one."""
        return bool(self._cuda.fake_cuda_capture(self.stream, int(on), 1))

    def allocated(self) -> int:
        """Bytes of results on all devices of this process that have not been freed."""
        return int(self._cuda.fake_cuda_allocated())
