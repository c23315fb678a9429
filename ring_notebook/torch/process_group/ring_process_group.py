"""The process group of backend "ring", and how torch.distributed makes one."""

# Torch declares overloads for callers of other kinds; its own code calls what stands here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ring_notebook.core import world
from ring_notebook.errors import RingError
from ring_notebook.torch.process_group.operands import caller_waits
from ring_notebook.torch.process_group.point_to_point import SendingGroup
from ring_notebook.torch.process_group.ring_work import RingWork
from ring_notebook.torch.steps.plain_optimizers import guard_steps
from ring_notebook.torch.tensors import buffer_of, from_bytes
from ring_notebook.torch_private import private


class RingProcessGroup(SendingGroup):
    """torch.distributed's operations on the native core, for tensors in CPU memory.

    It has a communicator of its own: no call of `ring_notebook.torch` can be taken for one of torch.distributed. All
    operations raise CollectiveMismatch on every rank when the ranks do not call the same, CollectiveAborted when
    another rank failed, left or died, CollectiveTimeout after the group's ``timeout``, and KeyboardInterrupt when this
    process is interrupted while it waits.
    """

    def barrier(self, opts: Any = None) -> RingWork:
        """Complete when all ranks have called it."""
        blocking = caller_waits(opts)
        return self._work([self.communicator.barrier(name="dist.barrier", blocking=blocking)], None, [], blocking)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> RingProcessGroup | None:
        """The part of this group that this rank asks for, by ranks of this group; None where it is not in it.

        All ranks of this group call it, each with the part that it wants to be in.
        """
        wanted = torch.full([self.size()], -1, dtype=torch.int64, device="cpu")
        wanted[: len(new_ranks)] = torch.tensor(list(new_ranks), dtype=torch.int64, device="cpu")
        work = self.communicator.allgather(buffer_of(wanted), name="dist.split_group")
        lists = from_bytes(work.output(), torch.int64, [self.size(), self.size()]).tolist()
        parts = {tuple(rank for rank in one if rank >= 0) for one in lists}
        if not any(self.rank() in part and part == tuple(new_ranks) for part in parts):
            return None
        name = group_name or f"{self.group_name} split {'-'.join(map(str, new_ranks))}"
        limit = timeout if timeout is not None else timedelta(seconds=self._seconds)
        store = c10d.PrefixStore(f"{name}/", self._store)
        part = RingProcessGroup([self._ranks[rank] for rank in new_ranks], store, limit, name)
        part._set_group_desc(group_desc or "undefined")
        return part


def create(opts: Any, options: Any) -> RingProcessGroup:
    """torch.distributed's maker of a group; its members alone call it.

    For the default group it opens an epoch where none is open, or the open one has been aborted. Raises RingError when
    the ranks of torch.distributed are not those of this job or run.
    """
    guard_steps()
    is_default = not opts.global_ranks_in_group
    if is_default and (not world.is_initialized() or world.is_aborted()):
        world.init()
    current = world.current()
    ranks = list(range(opts.group_size)) if is_default else list(opts.global_ranks_in_group)
    rank, everyone = ranks[opts.group_rank], opts.group_size if is_default else dist.get_world_size()
    if (rank, everyone) != (current.rank, current.size):
        raise RingError(
            f"backend 'ring': this process is rank {current.rank} of {current.size}, and torch.distributed was told "
            f"rank {rank} of {everyone}; start it with ringrun, or in a %%ringtrain cell, and leave rank and "
            "world_size out"
        )
    _keep_flight_recorder_out()
    return RingProcessGroup(ranks, opts.store, opts.timeout, opts.group_id)


def _keep_flight_recorder_out() -> None:
    """Have torch attach no flight recorder to the group: it would ask a backend in C++ for its name, and there is none.

    Torch records what passes its dispatcher, which operations of a group in Python do not.
    """
    if private("self_recording_backends") is None and hasattr(c10d, "FlightRecorderHook"):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def _keep_compiler_out(*classes: type) -> None:
    """Have torch.compile leave alone what C++ calls of these while a compiled function runs, as DDP's forward pass.

    It compiles every Python function that it sees begin there, and knows no attributes of process groups.
    """
    set_strategy, action, strategy = map(private, ("set_frame_strategy", "frame_action", "frame_strategy"))
    known = set_strategy is not None and action is not None and strategy is not None
    for base in {base for cls in classes for base in cls.__mro__ if base.__module__.startswith(__package__)}:
        for name, function in list(vars(base).items()):
            if not isinstance(function, FunctionType):
                continue
            if known:
                set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))  # what they call too
            else:
                setattr(base, name, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


_keep_compiler_out(RingProcessGroup, RingWork)
