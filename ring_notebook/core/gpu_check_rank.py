"""One of the two ranks of the doctor's check of GPUs: ``python -m ring_notebook.core.gpu_check_rank [--shared]``.

With ``--shared`` both use the only GPU, and reduce through CPU memory if NCCL does not connect them.
Rank 0 prints a line of JSON for each step: its name, whether it succeeded, and a message.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, TypeAlias

from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.buffers import Buffer, Device, DType
from ring_notebook.core.communicator import Communicator, ReduceOp
from ring_notebook.core.native import device_report
from ring_notebook.core.partition import row_split
from ring_notebook.core.work import Work
from ring_notebook.errors import CollectiveAborted, RingError

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostMemory:
    """Memory of this process, with the methods of `GpuMemory`."""

    def buffer(self, data: bytes, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        owner = ctypes.create_string_buffer(data, len(data))
        return Buffer(ctypes.addressof(owner), shape, dtype, owner)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def output(self, work: Work) -> bytes:
        """What an allgather or alltoall has received."""
        return bytes(work.output())


class GpuMemory:
    """Memory and one stream of GPU ``index``, through the driver library at ``path``. For one thread.

    Raises RingError, which names the call, where the driver reports an error.
    """

    def __init__(self, path: str, index: int) -> None:
        self._driver = ctypes.CDLL(path)
        self._index = index
        self._callbacks: list[Any] = []
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        # The context that CUDA's run time uses, and so every framework and NCCL.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self._stream = stream.value or 0

    def buffer(self, data: bytes, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A buffer on the GPU with these values; its memory is never freed."""
        address = ctypes.c_uint64()
        stream = ctypes.c_void_p(self._stream)
        self._call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(max(1, len(data))), stream)
        self._call("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(len(data)), stream)
        self._call("cuStreamSynchronize", stream)
        return Buffer(address.value, shape, dtype, None, Device.CUDA, self._index, self._stream)

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at ``address``, after all work on the stream."""
        data = ctypes.create_string_buffer(nbytes)
        stream = ctypes.c_void_p(self._stream)
        self._call("cuMemcpyDtoHAsync_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), stream)
        self._call("cuStreamSynchronize", stream)
        return data.raw

    def output(self, work: Work) -> bytes:
        received = work.device_output()
        return self.read(received.address, received.nbytes)

    def call(self, function: Callable[[], None]) -> None:
        """Queue ``function`` on the stream: later work on the stream waits for its return."""
        callback = _HOST_FUNCTION(lambda _: function())
        self._callbacks.append(callback)
        self._call("cuLaunchHostFunc", ctypes.c_void_p(self._stream), callback, None)

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._driver, name)(*arguments):
            raise RingError(f"the CUDA driver reports error {result} from {name}")


_COUNT = 1000  # elements: not a multiple of a vector
_SLEEP = 3600.0  # seconds; the doctor ends the rank long before
# The dtypes that NCCL reduces, and how Python packs them. The bytes of a bfloat16 are the upper half of a float32's.
_FORMATS = {
    DType.FLOAT16: "e",
    DType.BFLOAT16: "f",
    DType.FLOAT32: "f",
    DType.FLOAT64: "d",
    DType.INT8: "b",
    DType.UINT8: "B",
    DType.INT32: "i",
    DType.INT64: "q",
    DType.UINT32: "I",
    DType.UINT64: "Q",
}
_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)

Memory: TypeAlias = GpuMemory | HostMemory
Operation: TypeAlias = Callable[[Communicator, Memory, DType], bytes]
"""Runs an operation on this rank's values in a memory, and returns the bytes of its result."""


def main() -> None:
    """Run all steps, until one fails."""
    found = device_report()
    wrong = "; ".join(found.errors)
    _say("libraries", not wrong, wrong or f"driver of CUDA {found.driver}, NCCL {found.nccl}")
    if wrong:
        return
    world.init()
    here = world.current()
    communicator, rank = here.communicator, here.rank
    memory = GpuMemory(config().cuda_library or "libcuda.so.1", here.local_rank % len(found.names))
    if _step("connect", rank, lambda: _connect(communicator, memory)) and _step(
        "results", rank, lambda: _compare(communicator, memory)
    ):
        _step("death", rank, lambda: _die(communicator, memory))
        os._exit(0)  # the other rank is dead, so the generation cannot be closed


def _step(name: str, rank: int, step: Callable[[], str]) -> bool:
    try:
        found, fine = step(), True
    except (RingError, ValueError) as error:
        found, fine = str(error), False
    if rank == 0:
        _say(name, fine, found)
    return fine


def _say(name: str, fine: bool, found: str) -> None:
    if os.environ.get("RANK") == "0":
        os.write(1, json.dumps({"step": name, "fine": fine, "found": found}).encode() + b"\n")


def _connect(communicator: Communicator, memory: GpuMemory) -> str:
    started = time.monotonic()
    ones = memory.buffer(_values(DType.FLOAT32, 0, 1), DType.FLOAT32, (1,))
    communicator.allreduce([ones], [ones])
    transport, why = communicator.device_transport()
    if transport == "nccl":
        return f"two ranks connected in {time.monotonic() - started:.1f} s"
    if "--shared" not in sys.argv:
        raise RingError(why)
    return f"two ranks that share it reduce through CPU memory ({why})"


def _values(dtype: DType, rank: int, count: int) -> bytes:
    """Small integers: every type holds their sums and products exactly, in any order."""
    values = list(islice(cycle(range(1, 6)), rank, rank + count))
    data = struct.pack(f"<{count}{_FORMATS[dtype]}", *values)
    return b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4)) if dtype is DType.BFLOAT16 else data


def _compare(communicator: Communicator, memory: GpuMemory) -> str:
    """Raise RingError that names the first operation whose result on the GPU is not the host's, bit by bit."""
    host, compared = HostMemory(), 0
    for dtype in _FORMATS:
        for name, operation in _operations(dtype).items():
            expected, got = (operation(communicator, where, dtype) for where in (host, memory))
            if expected != got:
                place = next(at for at, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
                raise RingError(
                    f"{name} of {dtype.name.lower()} differs from the host's, first in byte {place} of {len(expected)}"
                )
            compared += 1
    return f"{compared} results equal to the host's, bit by bit"


def _operations(dtype: DType) -> dict[str, Operation]:
    sums = {op: _reduced(op) for op in ReduceOp if op is not ReduceOp.ADASUM}
    if dtype not in _FLOATS:  # the host computes these, also for tensors on a GPU
        del sums[ReduceOp.AVERAGE]
    return {op.name.lower(): operation for op, operation in sums.items()} | {
        "reducescatter": _scattered,
        "broadcast": _broadcast,
        "allgather": _gathered,
        "alltoall": _exchanged,
    }


def _reduced(op: ReduceOp) -> Operation:
    def reduce(communicator: Communicator, memory: Memory, dtype: DType) -> bytes:
        buffer = _buffer(memory, dtype, communicator.rank)
        communicator.allreduce([buffer], [buffer], op=op)
        return memory.read(buffer.address, buffer.nbytes)

    return reduce


def _scattered(communicator: Communicator, memory: Memory, dtype: DType) -> bytes:
    output = _buffer(memory, dtype, communicator.rank, row_split(_COUNT, communicator.size)[communicator.rank])
    communicator.reducescatter(_buffer(memory, dtype, communicator.rank), output)
    return memory.read(output.address, output.nbytes)


def _broadcast(communicator: Communicator, memory: Memory, dtype: DType) -> bytes:
    buffer = _buffer(memory, dtype, communicator.rank)
    communicator.broadcast(buffer, buffer, communicator.size - 1)
    return memory.read(buffer.address, buffer.nbytes)


def _gathered(communicator: Communicator, memory: Memory, dtype: DType) -> bytes:
    rank = communicator.rank
    return memory.output(communicator.allgather(_buffer(memory, dtype, rank, _COUNT + rank)))


def _exchanged(communicator: Communicator, memory: Memory, dtype: DType) -> bytes:
    rank = communicator.rank
    splits = [100 + rank] * (communicator.size - 1)
    return memory.output(communicator.alltoall([_buffer(memory, dtype, rank)], [*splits, _COUNT - sum(splits)]))


def _buffer(memory: Memory, dtype: DType, rank: int, count: int = _COUNT) -> Buffer:
    return memory.buffer(_values(dtype, rank, count), dtype, (count,))


def _die(communicator: Communicator, memory: GpuMemory) -> str:
    """Rank 1 dies while its part of an operation waits on its GPU, and rank 0's part runs."""
    buffer = _buffer(memory, DType.FLOAT32, communicator.rank)
    if communicator.rank:
        if communicator.device_transport()[0] == "nccl":  # through CPU memory the call would wait for its GPU
            memory.call(lambda: time.sleep(_SLEEP))
            communicator.allreduce([buffer], [buffer])
        os.kill(os.getpid(), signal.SIGKILL)
    started = communicator.allreduce([buffer], [buffer], blocking=False)
    began = time.monotonic()
    try:
        started.wait_done()
    except CollectiveAborted:
        return f"a rank that died was noticed in {time.monotonic() - began:.2f} s"
    raise RingError("an operation succeeded although the other rank had died")


if __name__ == "__main__":
    main()
