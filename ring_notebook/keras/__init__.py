"""The Horovod-compatible face for Keras: import it as ``hvd`` in place of ``horovod.keras``."""

from ring_notebook.api import common
from ring_notebook.api.common import *  # noqa: F403 - what all faces share
from ring_notebook.keras import callbacks, elastic
from ring_notebook.keras.distributed_optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ring_notebook.keras.fit_rows import log_fits
from ring_notebook.keras.gradient_compression import Compression
from ring_notebook.keras.saved_models import load_model
from ring_notebook.keras.values import allgather, allreduce, broadcast, reducescatter

log_fits()

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += common.__all__
