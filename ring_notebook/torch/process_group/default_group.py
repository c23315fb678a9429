"""The default group of torch.distributed for the ranks of a run, and what becomes of groups when a run ends."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from importlib import import_module
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ring_notebook.core import world
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.torch.process_group.ring_process_group import RingProcessGroup
from ring_notebook.torch.process_group.run_store import run_store
from ring_notebook.torch.tensors import buffer_of
from ring_notebook.torch_backend import register
from ring_notebook.torch_private import private

_GLOO = "gloo/transport/"  # in the file names with which its errors begin
_PATIENCE = 1.0  # seconds that a group has to end


def process_group(backend: str | None = None, timeout: timedelta | None = None) -> c10d.ProcessGroup:
    """The default group of torch.distributed over all ranks of the run or job; all of them call this. Beyond Horovod.

    Makes it where there is none, and makes a new one where that of an earlier cell has another ``backend`` or other
    ranks; else it is the one that is there, so that a cell may run again. ``backend`` is "ring" when left out, "gloo",
    "nccl", or any other that torch.distributed knows. ``timeout`` is that of `torch.distributed.init_process_group`.
    Raises NotInitializedError before ``init()``.
    """
    register()
    current = world.current()
    wanted = backend or "ring"
    fits = torch.tensor([int(_fits(wanted, current))], device="cpu")
    memory = buffer_of(fits)
    current.communicator.allreduce([memory], [memory], op=ReduceOp.MIN)  # on every rank, or on none
    if not fits.item():
        end_groups()
        store = run_store(timeout or c10d.default_pg_timeout)
        dist.init_process_group(wanted, store=store, rank=current.rank, world_size=current.size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    if isinstance(group, RingProcessGroup):
        group.communicator  # noqa: B018  all ranks are here: what comes next may be a message between two of them
    return group


def _fits(backend: str, current: world.World) -> bool:
    return (
        dist.is_initialized()
        and dist.get_backend() == backend
        and (dist.get_rank(), dist.get_world_size()) == (current.rank, current.size)
    )


def _groups() -> list[c10d.ProcessGroup]:
    registry = private("group_registry")
    known = [dist.group.WORLD] if registry is None else list(registry.pg_map)
    return [group for group in known if group is not None]


def foreign_groups() -> list[c10d.ProcessGroup]:
    """The groups of other backends in this process."""
    return [group for group in _groups() if not isinstance(group, RingProcessGroup)]


def tells_of_lost_rank(error: BaseException) -> bool:
    """Whether ``error`` is what Gloo or NCCL raises when the connection to another rank has ended."""
    return isinstance(error, dist.DistBackendError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def end_groups_of_failed_generation() -> None:
    """Called when this rank leaves a generation: where a rank has failed, end the groups of other backends.

    Their ranks may be out of step, or wait for one another: where this rank's connections close, they raise. Groups of
    ours have ended with the generation, and restart with the next.
    """
    if world.is_aborted() and foreign_groups():
        _destroy()
    _forget_attempts()


def end_groups() -> None:
    """End all groups of torch.distributed in this process, so that ``init_process_group`` can make a default group.

    A model of an earlier cell that holds one trains on, as nobody has destroyed it in the notebook.
    """
    if dist.is_initialized():
        _destroy()
    _forget_attempts()
    # Its functions take for ever the default group that there is when they are defined: there has to be none.
    # DistributedDataParallel imports it.
    import_module("torch.distributed.nn.functional")


class _Holder:
    """Holds a group. Copies and files of what has this have None in its place."""

    __slots__ = ("group",)

    def __init__(self, group: c10d.ProcessGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_wrappers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Each DistributedDataParallel, and `world.disruptions` when its C++ part was last made or reset."""


def follow_wrappers() -> None:
    """From now on models under DistributedDataParallel are known, and those of other backends free their groups last.

    C++ frees a group with the interpreter's lock held, and waits for the group's threads. A thread of Gloo that ends an
    operation may need that lock: both would wait for ever. Python frees a group without the lock.
    """
    wrap: Any = DistributedDataParallel
    original = wrap.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if hasattr(self, "reducer"):  # else all its gradients are left to others
            _wrappers[self] = world.disruptions()
        if not isinstance(self.process_group, RingProcessGroup):
            self.__dict__["_ring_holder"] = _Holder(self.process_group)  # attributes end in the order of their setting

    wrap.__init__ = init


def forget_failed_passes() -> None:
    """Called when this rank has entered a generation: have models under DistributedDataParallel begin a pass anew.

    Where a backward pass has failed, C++ waits for its end and refuses the next. All ranks reset theirs where one has
    failed: they arrange their buckets again, together.
    """
    disruptions, reset = world.disruptions(), private("reset_reducer")
    for wrapper in [known for known, until in _wrappers.items() if until < disruptions]:
        _wrappers[wrapper] = disruptions
        if reset is not None:
            reset(wrapper.reducer)


def forget_accelerate() -> None:
    """Have accelerate, which Hugging Face's Trainer stands on, find the ranks of this run again, and not its first."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    end_groups()  # also where accelerate is not loaded: a rank that was healed would keep a group that the others end


def _forget_attempts() -> None:
    """Without a default group, make torch.distributed know of groups what it knows in a new process: nothing.

    A rank on which ``init_process_group`` failed or was interrupted has counted the group, and may have registered it:
    its next group would have a name that exists, or that the other ranks do not expect.
    """
    registry = private("group_registry")
    if registry is None or dist.is_initialized():
        return
    for known in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(registry, known, {}).clear()
    if unregister := private("unregister_groups"):
        unregister()
    registry.group_count = 0


def _destroy() -> None:
    foreign = foreign_groups()
    ours = [group for group in _groups() if isinstance(group, RingProcessGroup)]
    _abort(foreign)
    try:
        dist.destroy_process_group()
    except Exception:  # of another backend's; its state in torch.distributed has to go all the same
        dist.group.WORLD = None
    for group in ours:
        group.allow_use_after_shutdown()
    # Who drops a group waits for its operations, such as a sum that a rank which failed has not joined.
    drops = Thread(target=foreign.clear, name="ring-end-groups", daemon=True)
    drops.start()
    drops.join(_PATIENCE)


def _abort(groups: list[c10d.ProcessGroup]) -> None:
    for group in groups:
        with suppress(RuntimeError):  # those that cannot be aborted end when nobody holds them
            group.abort()
