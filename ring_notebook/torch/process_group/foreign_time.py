"""Counts the time that this rank spends in groups of other backends, whose C++ does not report it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ring_notebook.core.other_waits import ForeignWait
from ring_notebook.torch.process_group.default_group import foreign_groups
from ring_notebook.torch.process_group.ring_process_group import RingProcessGroup
from ring_notebook.torch_private import private

_MESSAGES = {"SEND", "RECV", "RECVANYSOURCE"}
_NAMES = {
    "_ALLGATHER_BASE": "all_gather_single",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_single",
    "ALLGATHER": "all_gather",
    "ALLREDUCE": "all_reduce",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "RECVANYSOURCE": "recv",
    "UNKNOWN": "wait",
}
_kind_of = private("operation_kind")
_kinds = private("operation_kinds")
_at_end_of_backward = private("at_end_of_backward")
_FUTURE: Any = torch.futures.Future.__base__  # the class of futures from C++; waits there
_installed = False


def count_foreign_time() -> None:
    """From now on count waits for operations of other backends, also DistributedDataParallel's waits in C++.

    Patches ``Work.wait``, futures, ``wait_tensor`` of functional collectives and DTensor, ``monitored_barrier``, and
    models that are wrapped later. Compiled functions wait in C++, uncounted. Does nothing the second time.
    """
    global _installed
    if _installed:
        return
    _installed = True
    c10d.Work.wait = _counted_wait(c10d.Work.wait)  # type: ignore[method-assign]
    for owner, name, what in (
        (_FUTURE, "wait", "dist.wait"),
        (private("functional_collectives"), "wait_tensor", "dist.wait"),
        (c10d.ProcessGroup, "monitored_barrier", "dist.monitored_barrier"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _counted(getattr(owner, name), what))
    wrap: Any = DistributedDataParallel
    wrap.__init__ = _with_hook(wrap.__init__)
    if (sync_buffers := private("sync_buffers")) is not None:
        setattr(wrap, sync_buffers.__name__, _counted_sync(sync_buffers))


def _counted_wait(original: Any) -> Any:
    @wraps(original)
    def wait(self: Any, *args: Any, **options: Any) -> Any:  # the name tells pybind11 that it is no override
        if type(self) is not c10d.Work:  # of a backend in Python, such as ours
            return original(self, *args, **options)
        kind = _name_of_kind(self)
        with ForeignWait(f"dist.{_NAMES.get(kind, kind.lower())}", kind in _MESSAGES):
            return original(self, *args, **options)

    return wait


def _counted(original: Any, what: str) -> Any:
    """``original``, whose wait counts if this process has groups of other backends."""

    @wraps(original)
    def wait(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not foreign_groups() or _is_done(*args):
            return original(*args, **options)
        with ForeignWait(what):
            return original(*args, **options)

    return wait


def _is_done(waits_for: object, *_arguments: object) -> bool:
    return isinstance(waits_for, _FUTURE) and waits_for.done()


def _name_of_kind(work: Any) -> str:
    if _kind_of is None or _kinds is None:
        return "UNKNOWN"
    name: str = _kinds(_kind_of(work)).name
    return name


def _with_hook(original: Any) -> Any:
    @wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if not isinstance(self.process_group, RingProcessGroup):
            self.register_forward_hook(_watch_backward)

    return init


def _counted_sync(original: Any) -> Any:
    @wraps(original)
    def sync_buffers(self: DistributedDataParallel) -> None:
        if torch.compiler.is_compiling() or isinstance(self.process_group, RingProcessGroup):
            original(self)
            return
        with ForeignWait("dist.broadcast"):
            original(self)

    return sync_buffers


def _watch_backward(_model: torch.nn.Module, _inputs: object, output: object) -> None:
    """Count the wait for reductions at the end of the backward pass of ``output``.

    C++ waits in a callback that it queues during the pass. Autograd runs callbacks in order: the callback queued here
    with the first gradient runs before C++'s, and a callback that it queues runs after C++'s.
    """
    if torch.compiler.is_compiling() or _at_end_of_backward is None:
        return
    queue = _at_end_of_backward
    waiting = ForeignWait("dist.all_reduce")
    queued = False

    def before() -> None:
        waiting.__enter__()
        queue(lambda: waiting.__exit__(None, None, None))

    def first(_gradient: Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            queue(before)

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(first)  # type: ignore[no-untyped-call]


def tensors_in(output: object) -> Iterator[Tensor]:
    """The tensors of a model's output: in lists, tuples, dicts, dataclasses, attrs, and as attributes of others."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        parts: Iterable[object] = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif declared := fields(output) if is_dataclass(output) else getattr(output, "__attrs_attrs__", ()):
        parts = [getattr(output, one.name, None) for one in declared]
    else:  # only direct tensors: other attributes may be a model, or all the data
        parts = [one for one in getattr(output, "__dict__", {}).values() if isinstance(one, Tensor)]
    for part in parts:
        yield from tensors_in(part)
