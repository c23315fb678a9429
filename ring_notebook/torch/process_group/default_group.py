"""Makes the default group of torch.distributed for the ranks of a run, and ends groups when a run ends."""

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
_PATIENCE = 1.0  # seconds to wait for groups to end


def process_group(backend: str | None = None, timeout: timedelta | None = None) -> c10d.ProcessGroup:
    """The default group of torch.distributed over all ranks of the run or job; all of them call this. Beyond Horovod.

    Returns the present group if its ``backend`` and ranks match, so that a cell may run again; else makes a new one.
    ``backend`` is "ring" by default, "gloo", "nccl", or any other that torch.distributed knows. ``timeout`` is passed
    to `torch.distributed.init_process_group`, and set for a present group. Raises NotInitializedError before
    ``init()``.
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
    if timeout is not None and fits.item():
        group.set_timeout(timeout)
        import_module("ring_notebook.torch.process_group.gate").limit_time(group, timeout)  # which imports this module
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
    """Called when this rank leaves a generation: if a rank has failed, end the groups of other backends.

    Their ranks may be out of step, or wait for this one, and raise when its connections close. Groups of backend "ring"
    have ended with the generation, and restart with the next.
    """
    if world.is_aborted() and foreign_groups():
        _destroy()
    _forget_attempts()


def end_groups() -> None:
    """End all groups of torch.distributed in this process, so that ``init_process_group`` can make a default group.

    A model of an earlier cell that holds a "ring" group can still train: the user has not destroyed its group.
    """
    if dist.is_initialized():
        _destroy()
    _forget_attempts()
    # DistributedDataParallel imports this module, whose functions bind the default group that exists at the import.
    # Import it while there is none.
    import_module("torch.distributed.nn.functional")


class _Holder:
    """Holds a group. Copies and pickles have None instead."""

    __slots__ = ("group",)

    def __init__(self, group: c10d.ProcessGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_wrappers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Each DistributedDataParallel, and `world.disruptions` when its C++ part was last made or reset."""


def follow_wrappers() -> None:
    """From now on record models under DistributedDataParallel, and have Python free groups of other backends, last.

    C++ frees a group while it holds the GIL, and waits for the group's threads. A thread of Gloo that ends an operation
    may need the GIL: a deadlock. Python frees a group without the GIL.
    """
    wrap: Any = DistributedDataParallel
    original = wrap.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if hasattr(self, "reducer"):  # else it reduces no gradients
            _wrappers[self] = world.disruptions()
        if not isinstance(self.process_group, RingProcessGroup):
            self.__dict__["_ring_holder"] = _Holder(self.process_group)  # set last, so freed last

    wrap.__init__ = init


def forget_failed_passes() -> None:
    """Called when this rank has entered a generation: reset models under DistributedDataParallel after a failure.

    C++ waits for the end of a failed backward pass and refuses the next one. All ranks reset theirs, because they
    arrange their buckets again together.
    """
    disruptions, reset = world.disruptions(), private("reset_reducer")
    for wrapper in [known for known, until in _wrappers.items() if until < disruptions]:
        _wrappers[wrapper] = disruptions
        if reset is not None:
            reset(wrapper.reducer)


def forget_accelerate() -> None:
    """Reset accelerate, which Hugging Face's Trainer uses, so that it finds the ranks of this run."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    end_groups()  # even without accelerate: a restarted rank, which lacks it, must not keep a group that others end


def _forget_attempts() -> None:
    """If there is no default group, reset what torch.distributed has recorded of groups.

    If ``init_process_group`` fails or is interrupted on a rank, it has counted the group and may have registered it:
    the rank's next group would get a name that exists, or that the other ranks do not expect.
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
    except Exception:  # another backend's; reset torch.distributed anyway
        dist.group.WORLD = None
    for group in ours:
        group.allow_use_after_shutdown()
    # Freeing a group waits for its operations, such as a sum that a failed rank has not joined.
    drops = Thread(target=foreign.clear, name="ring-end-groups", daemon=True)
    drops.start()
    drops.join(_PATIENCE)


def _abort(groups: list[c10d.ProcessGroup]) -> None:
    for group in groups:
        with suppress(RuntimeError):  # groups that cannot be aborted end when they are freed
            group.abort()
