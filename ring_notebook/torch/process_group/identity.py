"""Who is in a process group, and its life: what torch.distributed asks of every group besides its operations."""

# Torch declares overloads for callers of other kinds; its own code calls what stands here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.work import Work
from ring_notebook.errors import RingError
from ring_notebook.torch.process_group.group_binding import bind
from ring_notebook.torch.process_group.ring_work import RingWork
from ring_notebook.torch.tensors import empty_in, reader

_CPU = torch.device("cpu")
_KEPT = 256
"""Handles of small sums that live on when Python has dropped them. DistributedDataParallel's ``join`` starts such a sum
in the forward pass and has C++ wait for it in the backward pass: where Python has forgotten the handle, C++ finds no
`wait` of ours and waits for ever."""


class GroupIdentity(c10d.ProcessGroup):
    """A process group over the open epoch. The next epoch gives it a communicator again, as long as the ranks stay.

    torch.distributed keeps a group, and a wrapped model keeps its group, for longer than a run; the core's epochs end
    with the run. So the group makes a communicator of its own when it is first used in an epoch; all members come
    there together, because what they call is collective.
    """

    def __init__(self, ranks: Sequence[int], store: c10d.Store, timeout: timedelta, name: str) -> None:
        """``ranks`` are those of the members in the epoch, this process's among them."""
        current = world.current()
        self._index = list(ranks).index(current.rank)
        super().__init__(self._index, len(ranks))  # type: ignore[call-arg]  # C++ has this one too
        self._ranks = tuple(ranks)
        self._everyone = current.size
        self._store = store
        self._seconds = _seconds(timeout)
        self._group_name, self._description = name, "undefined"
        self._world: world.World | None = None
        self._communicator: Communicator | None = None
        self._pending: list[RingWork] | None = None
        self._kept: deque[RingWork] = deque(maxlen=_KEPT)
        self._reader = reader(flat=True)
        self._bindings = 0
        self.communicator  # noqa: B018  all members are here now

    @property
    def communicator(self) -> Communicator:
        """The core's communicator of this group in the open epoch.

        Raises NotInitializedError when none is open, and RingError when the epoch has other ranks than the group.
        """
        communicator = self._communicator
        if communicator is None or self._world is not world.current():
            communicator = self._bind()
        return communicator

    def _bind(self) -> Communicator:
        current = world.current()
        if self._world is not None and self._communicator is None:
            raise RingError(f"rank {current.rank}: this process group has been destroyed; make a new one")
        if current.size != self._everyone:
            raise RingError(
                f"rank {current.rank}: this process group is of {self._everyone} ranks, and now there are "
                f"{current.size}; call ring.process_group(), or dist.destroy_process_group() and "
                "dist.init_process_group()"
            )
        self._bindings += 1
        self._kept.clear()
        communicator = bind(current.communicator, self._ranks, self._store, f"binding {self._bindings}")
        communicator.limit_time(self._seconds)
        communicator.match_in_order()  # names are torch's, for errors and timelines
        self._communicator, self._world = communicator, current
        return communicator

    # torch.distributed's names: some are read in Python, some are called by C++.

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return "ring"

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        """Index of this process in the group."""
        return self._index

    def size(self) -> int:
        """Number of members."""
        return len(self._ranks)

    def get_group_store(self) -> c10d.Store:
        """The store in which the members of this group find each other."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend 'ring' has nothing for {device}; use a group of backend 'nccl'")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives memory there in which operations are faster."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``size`` elements in ring memory (FSDP2 asks with ``set_allocate_memory_from_process_group_for_comm``)."""
        return empty_in(self.communicator, [size], dtype)

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which torch.distributed knows the group."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that its maker gave it."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        """The core counts operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing of this backend runs after an operation."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Have operations that begin from now on raise CollectiveTimeout after ``timeout``."""
        self._seconds = _seconds(timeout)
        self.communicator.limit_time(self._seconds)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group, once this rank's operations have ended."""
        communicator, self._communicator = self._communicator, None
        self._kept.clear()
        if communicator is not None:
            communicator.close()

    def abort(self) -> None:
        """End the epoch: pending and later operations of all its ranks raise CollectiveAborted."""
        if self._communicator is not None:
            rank = self._communicator.ranks[self._communicator.rank]
            self._communicator.abort(f"rank {rank} aborted its process group")

    def _start_coalescing(self, device: torch.device) -> None:
        self._pending = []

    def _end_coalescing(self, device: torch.device) -> RingWork:
        pending, self._pending = self._pending or [], None
        return RingWork([work for one in pending for work in one._works], lambda: [one.wait() for one in pending])

    def _work(
        self,
        works: Iterable[Work],
        finish: Callable[[], object] | None,
        result: Sequence[Any],
        blocking: bool,
        source: Callable[[], int] | None = None,
    ) -> RingWork:
        """The handle of ``works``, completed already when they were ``blocking``."""
        work = RingWork(works, finish, result, source)
        if blocking:
            work.wait()
        elif self._pending is not None:
            self._pending.append(work)
        return work

    def _who(self) -> int:
        return self._ranks[self._index]


def _seconds(timeout: timedelta) -> float:
    """The shorter one of torch.distributed's limit and RING_TIMEOUT, which is 0 where there is none."""
    own = config().timeout
    return min(timeout.total_seconds(), own) if own else timeout.total_seconds()
