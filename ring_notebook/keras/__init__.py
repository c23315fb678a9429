"""The Horovod-compatible face for Keras: import it as ``hvd`` in place of ``horovod.keras``."""

from ring_notebook.api import common
from ring_notebook.api.common import *  # noqa: F403 - what all faces share
from ring_notebook.core.kept_state import register_keeper
from ring_notebook.keras import callbacks, elastic
from ring_notebook.keras.checkpoint_callback import checkpoint
from ring_notebook.keras.distributed_optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    extend_loss_scaling,
)
from ring_notebook.keras.fit_log import extend_fits
from ring_notebook.keras.gradient_compression import Compression
from ring_notebook.keras.kept_models import KerasKeeper
from ring_notebook.keras.prepared_models import prepare
from ring_notebook.keras.saved_models import load_model
from ring_notebook.keras.train_steps import extend_steps
from ring_notebook.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)

register_keeper(KerasKeeper())
extend_fits()
extend_loss_scaling()
extend_steps()

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "checkpoint",
    "elastic",
    "load_model",
    "prepare",
    "reducescatter",
]
__all__ += common.__all__

_INSTEAD = "rank 0 alone writes a model, by model.save; load_model of this module reads it on all ranks"


def __getattr__(name: str) -> object:
    raise common.absent(__name__, name, _INSTEAD)
