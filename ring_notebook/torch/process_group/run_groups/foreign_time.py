"""Counts the time that this rank spends in groups of other backends, whose C++ tells nobody how long it waits."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ring_notebook.core.waits.other_waits import ForeignWait
from ring_notebook.torch.process_group.identity import GroupIdentity
from ring_notebook.torch.process_group.run_groups.foreign_waits import foreign_groups

__all__ = ["count_foreign_time"]

_OpType: Any = vars(c10d)["OpType"]  # which torch's stubs leave out
_MESSAGES = {_OpType.SEND, _OpType.RECV, _OpType.RECVANYSOURCE}
_NAMES = {
    _OpType._ALLGATHER_BASE: "all_gather_single",
    _OpType._REDUCE_SCATTER_BASE: "reduce_scatter_single",
    _OpType.ALLGATHER: "all_gather",
    _OpType.ALLREDUCE: "all_reduce",
    _OpType.ALLTOALL: "all_to_all",
    _OpType.ALLTOALL_BASE: "all_to_all_single",
    _OpType.RECVANYSOURCE: "recv",
    _OpType.UNKNOWN: "wait",
}
_installed = False


def count_foreign_time() -> None:
    """From now on count waits for operations of other backends, and what DistributedDataParallel waits for in C++.

    Changes what Python waits through: ``Work.wait``, futures, ``wait_tensor`` of functional collectives and DTensor,
    ``monitored_barrier``; and models that are wrapped later. Compiled functions wait in C++, uncounted. Does nothing
    the second time.
    """
    global _installed
    if _installed:
        return
    _installed = True
    c10d.Work.wait = _counted_wait(c10d.Work.wait)  # type: ignore[method-assign]
    for owner, name, what in (
        (torch._C.Future, "wait", "dist.wait"),
        (functional, "wait_tensor", "dist.wait"),
        (c10d.ProcessGroup, "monitored_barrier", "dist.monitored_barrier"),
    ):
        setattr(owner, name, _counted(getattr(owner, name), what))
    wrap: Any = DistributedDataParallel
    wrap.__init__ = _with_hook(wrap.__init__)
    wrap._sync_buffers = _counted_sync(wrap._sync_buffers)


def _counted_wait(original: Any) -> Any:
    @wraps(original)
    def wait(self: Any, *args: Any, **options: Any) -> Any:  # pybind11 knows by this name that it is no override
        if type(self) is not c10d.Work:  # of a backend in Python, as ours is
            return original(self, *args, **options)
        kind = _OpType(_kind_of(self))
        with ForeignWait(f"dist.{_NAMES.get(kind, kind.name.lower())}", kind in _MESSAGES):
            return original(self, *args, **options)

    return wait


def _counted(original: Any, what: str) -> Any:
    """``original``, whose wait counts where this process has groups of other backends."""

    @wraps(original)
    def wait(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not foreign_groups() or _is_done(*args):
            return original(*args, **options)
        with ForeignWait(what):
            return original(*args, **options)

    return wait


def _is_done(waits_for: object, *_arguments: object) -> bool:
    return isinstance(waits_for, torch._C.Future) and waits_for.done()


def _kind_of(work: Any) -> int:
    kind: int = work._get_op_type()  # which torch's stubs leave out
    return kind


def _with_hook(original: Any) -> Any:
    @wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if not isinstance(self.process_group, GroupIdentity):
            self.register_forward_hook(_watch_backward)

    return init


def _counted_sync(original: Any) -> Any:
    @wraps(original)
    def sync_buffers(self: DistributedDataParallel) -> None:
        if torch.compiler.is_compiling() or isinstance(self.process_group, GroupIdentity):
            original(self)
            return
        with ForeignWait("dist.broadcast"):
            original(self)

    return sync_buffers


def _watch_backward(_model: torch.nn.Module, _inputs: object, output: object) -> None:
    """Count what the backward pass of ``output`` waits for when all gradients are on their way.

    C++ waits in a callback that it queues while gradients come. The engine runs callbacks in order: one that is
    queued with the first gradient comes before that one, and one that is queued by it comes behind.
    """
    if torch.compiler.is_compiling():
        return
    waiting = ForeignWait("dist.all_reduce")
    queued = False
    queue = Variable._execution_engine.queue_callback

    def before() -> None:
        waiting.__enter__()
        queue(lambda: waiting.__exit__(None, None, None))

    def first(_gradient: Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            queue(before)

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(first)  # type: ignore[no-untyped-call]
