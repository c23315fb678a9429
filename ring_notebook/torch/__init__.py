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

from ring_notebook.api import common
from ring_notebook.api.common import *  # noqa: F403 - what all faces share
from ring_notebook.api.local_steps import LocalSteps
from ring_notebook.api.tensor_adapter import register_adapter
from ring_notebook.core import world
from ring_notebook.core.kept_state import register_keeper
from ring_notebook.core.logical_ranks import logical_rank, logical_size, logical_turns
from ring_notebook.core.metrics import register_copier
from ring_notebook.torch import elastic, mpi_ops
from ring_notebook.torch.collectives.allgather import allgather_into
from ring_notebook.torch.collectives.gather_scatter import gather, scatter
from ring_notebook.torch.collectives.point_to_point_calls import irecv, isend, recv, send
from ring_notebook.torch.compression import Compression
from ring_notebook.torch.devices import begin_copy
from ring_notebook.torch.mpi_ops import *  # noqa: F403 - all of it is Horovod's
from ring_notebook.torch.optimizer.distributed import DistributedOptimizer
from ring_notebook.torch.optimizer.reducing_optimizer import clip_grad_norm_
from ring_notebook.torch.process_group import gate
from ring_notebook.torch.process_group.default_group import (
    end_groups_of_failed_generation,
    follow_wrappers,
    forget_failed_passes,
    process_group,
)
from ring_notebook.torch.tensors import TorchAdapter, empty
from ring_notebook.torch.training.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from ring_notebook.torch.training.checkpoint import checkpoint, load, save
from ring_notebook.torch.training.drift_check import check
from ring_notebook.torch.training.kept_objects import TorchKeeper
from ring_notebook.torch.training.lars_lamb import LAMB, LARS
from ring_notebook.torch.training.memory import memory
from ring_notebook.torch.training.noise_scale import noise_scale
from ring_notebook.torch.training.prepare import prepare
from ring_notebook.torch.training.rank_shares import DistributedSampler
from ring_notebook.torch.training.schedules import LinearScalingLR
from ring_notebook.torch.training.sync_batch_norm import SyncBatchNorm
from ring_notebook.torch_backend import register
from ring_notebook.torch_private import uncompiled

register_adapter(TorchAdapter())
register_keeper(TorchKeeper())
register_copier(begin_copy)
register()
world.at_close(end_groups_of_failed_generation)
gate.install()
world.at_open(forget_failed_passes)
follow_wrappers()
uncompiled(common.log)  # it waits for the value

__all__ = [
    "LAMB",
    "LARS",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "LinearScalingLR",
    "LocalSteps",
    "SyncBatchNorm",
    "allgather_into",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check",
    "checkpoint",
    "clip_grad_norm_",
    "elastic",
    "empty",
    "gather",
    "irecv",
    "isend",
    "load",
    "logical_rank",
    "logical_size",
    "logical_turns",
    "memory",
    "mpi_ops",
    "noise_scale",
    "prepare",
    "process_group",
    "recv",
    "save",
    "scatter",
    "send",
]
__all__ += common.__all__
__all__ += mpi_ops.__all__  # some names are in both: completion reads these lines without an import
