"""Horovod's ``mpi_ops``: collectives, ranks and process sets without optimizers and elastic training.

Libraries import this module, and find it as an attribute of the face.
"""

from __future__ import annotations

from ring_notebook.api import basics
from ring_notebook.api.basics import *  # noqa: F403 - all of it is Horovod's
from ring_notebook.api.handles import poll, synchronize
from ring_notebook.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ring_notebook.errors import HorovodInternalError
from ring_notebook.torch.collectives.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from ring_notebook.torch.collectives.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from ring_notebook.torch.collectives.alltoall import alltoall, alltoall_async
from ring_notebook.torch.collectives.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from ring_notebook.torch.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ring_notebook.torch.collectives.sparse_allreduce import sparse_allreduce_async

__all__ = [
    "HorovodInternalError",
    "ProcessSet",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += basics.__all__
