"""A pretended device of torch, "fakegpu": its tensors are in host memory, and streams do its work.

It is torch's backend PrivateUse1 in Python: a tensor of the device wraps one in host memory. Copies go through a stream
of the `Driver` in the background, as on a GPU. Every other operation first waits until its stream is idle, as if it
were queued there. So work that is not ordered behind a stream reads old values. `waits` notes calls that make the host
wait for a GPU (``.item()``, ``.cpu()``, ``synchronize``). Operations that torch refuses on a GPU raise (`gpu_rules`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from harness.devices.gpu_rules import check, host_waits
from ring_notebook.core.buffers import Device

__all__ = ["NAME", "DeviceTensor", "Driver", "PretendedGpu", "PretendedKind", "pretend"]

NAME = "fakegpu"
aten = torch.ops.aten

# Operations that do not touch memory.
_MAKING = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_COPYING = {aten.copy_.default, aten._foreach_copy_.default}


class Driver(Protocol):
    """Executes the copies of one device; handles are those of the CUDA driver API."""

    def stream(self) -> int:
        """A new stream."""

    def event(self) -> int:
        """A new event."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy of memory."""

    def record(self, event: int, stream: int) -> None:
        """Queue the event."""

    def wait(self, stream: int, event: int) -> None:
        """Have the stream wait for the event."""

    def done(self, event: int) -> bool:
        """Whether the event has been reached."""

    def synchronize(self, stream: int) -> None:
        """Wait until the stream is idle."""

    def hold(self, stream: int) -> Callable[[], None]:
        """Hold back everything queued next on the stream until the returned function is called."""

    def capture(self, stream: int, on: bool) -> None:
        """Begin or end the capture of a graph on the stream."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``host`` has its values."""

    host: Tensor
    gpu: ClassVar[PretendedGpu]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        if host.layout is torch.strided:
            layout: dict[str, Any] = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        else:  # torch needs the layout, also in the keys by which it dispatches an operation
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Sparse)
            layout = {"layout": host.layout, "dispatch_layout": True, "_extra_dispatch_keys": keys}
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), dtype=host.dtype, device=torch.device(NAME, 0), **layout
        )
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.gpu.execute(func, args, dict(kwargs or {}))


class _Stream:
    """Like ``torch.cuda.Stream``."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self.cuda_stream = gpu.driver.stream()

    def wait_event(self, event: _Event) -> None:
        self._gpu.driver.wait(self.cuda_stream, event.cuda_event)

    def synchronize(self) -> None:
        self._gpu.note("Stream.synchronize")
        self._gpu.driver.synchronize(self.cuda_stream)


class _Event:
    """Like ``torch.cuda.Event``: it exists once it is recorded."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self.cuda_event = 0

    def record(self, stream: _Stream | None = None) -> None:
        self.cuda_event = self.cuda_event or self._gpu.driver.event()
        self._gpu.driver.record(self.cuda_event, (stream or self._gpu.current_stream()).cuda_stream)

    def query(self) -> bool:
        return not self.cuda_event or self._gpu.driver.done(self.cuda_event)

    def synchronize(self) -> None:
        self._gpu.note("Event.synchronize")
        while not self.query():
            pass


class PretendedGpu(ModuleType):
    """The module ``torch.fakegpu``, with the functions of ``torch.cuda`` that this project calls."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(NAME)
        self.driver = driver
        self.waits: list[str] = []
        self._default = _Stream(self)
        self._streams = threading.local()
        self._captured = -1
        self._kept: list[tuple[Any, _Event]] = []

    def note(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.waits.append(what)

    # What torch calls.
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    # What users and this project call.
    def current_stream(self, device: Any = None) -> _Stream:
        stream: _Stream = getattr(self._streams, "current", self._default)
        return stream

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._streams.current = self.current_stream(), stream
        try:
            yield
        finally:
            self._streams.current = before

    @contextmanager
    def held(self, stream: _Stream | None = None) -> Iterator[None]:
        """In the block the stream (by default the current one) executes nothing."""
        release = self.driver.hold((stream or self.current_stream()).cuda_stream)
        try:
            yield
        finally:
            release()

    def Stream(self) -> _Stream:  # noqa: N802 - torch's names
        return _Stream(self)

    def Event(self, **_: Any) -> _Event:  # noqa: N802
        return _Event(self)

    def is_current_stream_capturing(self) -> bool:
        return self._captured == self.current_stream().cuda_stream

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph on the current stream in the block."""
        self._captured = self.current_stream().cuda_stream
        self.driver.capture(self._captured, True)
        try:
            yield
        finally:
            self.driver.capture(self._captured, False)
            self._captured = -1

    def synchronize(self, device: Any = None) -> None:
        self.note("synchronize")
        self.driver.synchronize(self.current_stream().cuda_stream)

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on tensors of the device."""
        if func is torch.ops.prim.layout.default:
            return args[0].host.layout
        check(func, args, kwargs, DeviceTensor)
        if func in _COPYING and self._copies_in_background(func, args):
            return args[0] if func._schema.returns else None
        to_host = func is aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type == "cpu"
        source = args[0].host if to_host else None
        if to_host and kwargs.get("non_blocking") and kwargs.get("dtype", source.dtype) is source.dtype:
            landing = torch.empty_like(source)
            self._queue(landing, source)
            return landing
        if to_host or host_waits(func, args, kwargs):
            self.note(func._schema.name)
        written = [_is_written(argument) for argument in func._schema.arguments]
        returned = func._schema.returns
        is_view = not any(written) and any(one.alias_info is not None for one in returned)
        if not is_view and func not in _MAKING:
            self.driver.synchronize(self.current_stream().cuda_stream)
        out = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if to_host:
            return out
        if any(written) and all(map(_is_written, returned)):
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            results = [named[a.name] for a, is_one in zip(func._schema.arguments, written, strict=True) if is_one]
            return None if not returned else results[0] if len(returned) == 1 else tuple(results)
        return tree_map(_on_device, out)

    def _copies_in_background(self, func: Any, args: Any) -> bool:
        """Queue copies that a GPU makes without the host; returns whether it could."""
        targets, sources = args[:2] if func is aten._foreach_copy_.default else ([args[0]], [args[1]])
        pairs = list(zip(targets, sources, strict=True))
        if not all(_alike(target, source) for target, source in pairs):
            return False
        for target, source in pairs:
            self._queue(target.host, source.host)
        return True

    def _queue(self, target: Tensor, source: Tensor) -> None:
        stream = self.current_stream().cuda_stream
        self.driver.copy(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size(), stream)
        # Like torch's allocator: memory that a stream still uses does not go to another tensor.
        event = _Event(self)
        event.record()
        self._kept = [(tensors, used) for tensors, used in self._kept if not used.query()]
        self._kept.append(((target, source), event))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _alike(target: Any, source: Any) -> bool:
    return (
        isinstance(target, DeviceTensor)
        and isinstance(source, DeviceTensor)
        and target.dtype is source.dtype
        and target.shape == source.shape
        and target.host.layout is source.host.layout is torch.strided
        and target.is_contiguous()
        and source.is_contiguous()
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def pretend(driver: Callable[[], Driver]) -> PretendedGpu:
    """Register the device with torch, once per process; ``driver`` makes the driver that executes its copies."""
    known = sys.modules.get(f"torch.{NAME}")
    if isinstance(known, PretendedGpu):
        return known
    gpu = PretendedGpu(driver())
    DeviceTensor.gpu = gpu
    _setup_privateuseone_for_python_backend(NAME, gpu)
    sys.modules[f"torch.{NAME}"] = gpu
    # Module.to keeps its parameter objects, as on a GPU: an optimizer would not know new ones.
    torch.__future__.set_swap_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format, device="cpu"))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        # Torch calls this, not the class, to make a tensor from Python numbers.
        gpu.note("copy")
        _on_host(target).copy_(_on_host(source))
        return target

    def arange(*bounds: Any, dtype: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.arange(*bounds, dtype=dtype, device="cpu"))

    def eye(*sizes: int, dtype: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.eye(*sizes, dtype=dtype, device="cpu"))

    # Torch's own versions would resize the memory of a tensor that has been made.
    for form, made in (("arange", arange), ("arange.start", arange), ("arange.start_step", arange), ("eye", eye)):
        library.impl(form, made, "PrivateUse1")
    library.impl("is_pinned", lambda tensor, device=None: False, "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    gpu.library = library
    return gpu


class PretendedKind:
    """The tensors of the device, as the core takes them."""

    device = Device.CUDA

    def address_of(self, tensor: Tensor) -> int:
        assert isinstance(tensor, DeviceTensor)
        return tensor.host.data_ptr()

    def device_of(self, tensor: Tensor) -> int:
        return 0

    def stream_of(self, tensor: Tensor) -> int:
        return DeviceTensor.gpu.current_stream().cuda_stream

    def from_memory(self, memory: Any, nbytes: int, device: torch.device) -> Tensor:
        held = (ctypes.c_uint8 * nbytes).from_address(memory.address)
        held.memory = memory  # type: ignore[attr-defined]
        return DeviceTensor(torch.frombuffer(held, dtype=torch.uint8))
