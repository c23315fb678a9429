"""The face for JAX: collectives inside and outside of ``jit``, gradients averaged over ranks, an optax wrapper."""

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "ring_notebook.jax needs JAX, which is not installed: `pip install 'ring-notebook[jax]'`", name="jax"
    ) from None
else:
    del jax

from ring_notebook.api import common
from ring_notebook.api.common import *  # noqa: F403 - what all faces share
from ring_notebook.core.kept_state import register_keeper
from ring_notebook.jax.all_devices import start_distributed
from ring_notebook.jax.averaging import DistributedOptimizer, average_gradients, broadcast_parameters
from ring_notebook.jax.checkpoint_of_trees import checkpoint
from ring_notebook.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allreduce,
    reducescatter,
)
from ring_notebook.jax.kept_arrays import JaxKeeper
from ring_notebook.jax.prepared_trees import prepare

register_keeper(JaxKeeper())

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "broadcast_parameters",
    "checkpoint",
    "grouped_allreduce",
    "prepare",
    "reducescatter",
    "start_distributed",
]
__all__ += common.__all__

_INSTEAD = "rank 0 alone writes arrays, by orbax or numpy.savez; broadcast_parameters gives all ranks what it reads"


def __getattr__(name: str) -> object:
    raise common.absent(__name__, name, _INSTEAD)
