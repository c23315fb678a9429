"""The Horovod-compatible face: import it as ``hvd`` in place of ``horovod.torch``."""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "ring_notebook.torch needs PyTorch, which is not installed: `pip install 'ring-notebook[torch]'`", name="torch"
    ) from None
else:
    del torch

from ring_notebook.api.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ring_notebook.api.counts import counts
from ring_notebook.api.handles import poll, synchronize
from ring_notebook.api.objects import allgather_object, broadcast_object
from ring_notebook.api.only import only
from ring_notebook.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ring_notebook.api.tensor_adapter import register_adapter
from ring_notebook.api.without_tensors import barrier, join
from ring_notebook.core import world
from ring_notebook.core.logged.device_numbers import register_copier
from ring_notebook.core.logged.metrics import log, log_params, track
from ring_notebook.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from ring_notebook.torch import elastic, mpi_ops
from ring_notebook.torch.collectives.allgather import (
    allgather,
    allgather_async,
    allgather_into,
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
from ring_notebook.torch.collectives.gather_scatter import gather, scatter
from ring_notebook.torch.collectives.point_to_point_calls import irecv, isend, recv, send
from ring_notebook.torch.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ring_notebook.torch.collectives.ring_memory import empty
from ring_notebook.torch.collectives.sparse_allreduce import sparse_allreduce_async
from ring_notebook.torch.compression import Compression
from ring_notebook.torch.logged_tensors import begin_copy
from ring_notebook.torch.optimizer.distributed import DistributedOptimizer
from ring_notebook.torch.optimizer.gradient_clipping import clip_grad_norm_
from ring_notebook.torch.process_group.run_groups.default_group import end_groups_of_failed_epoch, process_group
from ring_notebook.torch.tensors import TorchAdapter
from ring_notebook.torch.training.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from ring_notebook.torch.training.checkpoint import load, save
from ring_notebook.torch.training.consistency import check
from ring_notebook.torch.training.data import DistributedSampler
from ring_notebook.torch.training.lars_lamb import LAMB, LARS
from ring_notebook.torch.training.noise_scale import noise_scale
from ring_notebook.torch.training.prepare import prepare
from ring_notebook.torch.training.schedules import LinearScalingLR
from ring_notebook.torch.training.sync_batch_norm import SyncBatchNorm
from ring_notebook.torch_backend import register

register_adapter(TorchAdapter())
register_copier(begin_copy)
register()
world.at_close(end_groups_of_failed_epoch)

__all__ = [
    "LAMB",
    "LARS",
    "Adasum",
    "Average",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LinearScalingLR",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_into",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check",
    "clip_grad_norm_",
    "counts",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "empty",
    "gather",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "irecv",
    "is_homogeneous",
    "is_initialized",
    "isend",
    "join",
    "load",
    "local_rank",
    "local_size",
    "log",
    "log_params",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "noise_scale",
    "only",
    "poll",
    "prepare",
    "process_group",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "save",
    "scatter",
    "send",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "track",
]
