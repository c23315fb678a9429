"""The Horovod-compatible face for TensorFlow: import it as ``hvd`` in place of ``horovod.tensorflow``."""

try:
    import tensorflow
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "ring_notebook.tensorflow needs TensorFlow, which is not installed: `pip install 'ring-notebook[tensorflow]'`",
        name="tensorflow",
    ) from None
else:
    del tensorflow

from ring_notebook.api import common
from ring_notebook.api.common import *  # noqa: F403 - what all faces share
from ring_notebook.tensorflow import elastic
from ring_notebook.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from ring_notebook.tensorflow.keras_models import checkpoint, prepare
from ring_notebook.tensorflow.session_optimizer import DistributedOptimizer
from ring_notebook.tensorflow.sync_batch_normalization import SyncBatchNormalization
from ring_notebook.tensorflow.tensor_collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ring_notebook.tensorflow.tensor_compression import Compression

# Two of them take a session beside what those of all faces take.
from ring_notebook.tensorflow.variables import (  # type: ignore[assignment]
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "checkpoint",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "prepare",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += common.__all__

_INSTEAD = "rank 0 alone writes variables, by tf.train.Checkpoint; broadcast_variables gives all ranks what it reads"


def __getattr__(name: str) -> object:
    raise common.absent(__name__, name, _INSTEAD)
