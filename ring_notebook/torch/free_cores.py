"""Whether a rank has a free core to reduce gradients during its backward pass."""

from __future__ import annotations

from functools import lru_cache

import torch

from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.machine.hardware import cores_of
from ring_notebook.machine.os_calls import processors


def reduces_beside_backward(on_device: bool = False) -> bool:
    """Whether to reduce on the progress thread: as ``RING_OVERLAP`` says, or by default if the ranks leave a core free.

    ``on_device``: the gradients are on a GPU, which computes without a core.
    """
    overlap = config().overlap
    if overlap != "auto":
        return overlap == "thread"
    busy = world.current().local_size * torch.get_num_threads()
    return on_device or busy < _cores(frozenset(processors()))


@lru_cache(maxsize=8)
def _cores(processors: frozenset[int]) -> int:
    return cores_of(processors)  # cached: it reads files, and DistributedDataParallel asks for every bucket
