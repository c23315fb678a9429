"""A table of Horovod's modules: where each of their names comes from in this package.

It has the modules and names of Horovod 0.28.1 that scripts and libraries import.
"""

from __future__ import annotations

from collections.abc import Iterator

from ring_notebook import __version__

NAME = "horovod"
VERSION = f"0.28.1+ring.notebook.{__version__}"
"""Horovod's version, for comparisons, and ours."""

_TORCH = "ring_notebook.torch"
_TENSORFLOW = "ring_notebook.tensorflow"
_KERAS = "ring_notebook.keras"
_BASICS = "ring_notebook.api.basics"
_ERRORS = "ring_notebook.errors"
_SETS = "ring_notebook.api.process_sets"
_STATE = "ring_notebook.torch.elastic.torch_state"
_TENSORFLOW_UTIL = (
    "_executing_eagerly=executing_eagerly _make_subgraph=make_subgraph _cache=cached "
    "vars_to_refs=variables_to_references refs_to_vars=references_to_variables"
)
"""What ``horovod.tensorflow`` has from its ``util``, which Horovod's own tests call there."""

MODULES: dict[str, dict[str, str]] = {
    "horovod": {"ring_notebook.horovod.names": "__version__=VERSION", "ring_notebook.launch.horovod_run": "run"},
    "horovod.runner": {"ring_notebook.launch.horovod_run": "run"},
    "horovod.runner.common": {},
    "horovod.runner.common.util": {},
    "horovod.runner.common.util.env": {"ring_notebook.horovod.common_util": "get_env_rank_and_size"},
    "horovod.common": {},
    "horovod.common.exceptions": {_ERRORS: "HorovodInternalError HostsUpdatedInterrupt"},
    "horovod.common.process_sets": {_SETS: "ProcessSet global_process_set add_process_set remove_process_set"},
    "horovod.common.elastic": {"ring_notebook.api.elastic_training": "State"},
    "horovod.common.util": {
        _BASICS: "mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built",
        "ring_notebook.horovod.common_util": (
            "env extension_available gpu_available is_iterable is_version_greater_equal_than num_rank_is_power_2 "
            "split_list"
        ),
    },
    "horovod.torch": {_TORCH: "*"},
    "horovod.torch.mpi_ops": {"ring_notebook.torch.mpi_ops": "*", "ring_notebook.api": "_basics=basics"},
    "horovod.torch.compression": {
        "ring_notebook.torch.compression": (
            "Compression Compressor NoneCompressor=Compression.none FP16Compressor=Compression.fp16"
        )
    },
    "horovod.torch.functions": {
        _TORCH: "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
    },
    "horovod.torch.optimizer": {
        "ring_notebook.torch.optimizer.distributed": "DistributedOptimizer",
        "ring_notebook.torch.optimizer.reducing_optimizer": "_DistributedOptimizer=ReducingOptimizer",
        "ring_notebook.torch.optimizer.adasum_optimizer": "_DistributedAdasumOptimizer=AdasumOptimizer",
    },
    "horovod.torch.sync_batch_norm": {_TORCH: "SyncBatchNorm"},
    "horovod.torch.elastic": {"ring_notebook.torch.elastic": "*"},
    "horovod.torch.elastic.sampler": {_STATE: "ElasticSampler"},
    "horovod.torch.elastic.state": {_STATE: "TorchState"},
    "horovod.tensorflow": {_TENSORFLOW: "*", f"{_TENSORFLOW}.graph_call": _TENSORFLOW_UTIL},
    "horovod.tensorflow.compression": {
        f"{_TENSORFLOW}.tensor_compression": (
            "Compression Compressor NoneCompressor=Compression.none FP16Compressor=Compression.fp16"
        )
    },
    "horovod.tensorflow.functions": {
        _TENSORFLOW: (
            "allgather_object broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables"
        )
    },
    "horovod.tensorflow.mpi_ops": {_TENSORFLOW: "*", "ring_notebook.api": "_basics=basics"},
    "horovod.tensorflow.util": {f"{_TENSORFLOW}.graph_call": _TENSORFLOW_UTIL},
    "horovod.tensorflow.sync_batch_norm": {_TENSORFLOW: "SyncBatchNormalization"},
    "horovod.tensorflow.elastic": {f"{_TENSORFLOW}.elastic": "*"},
    "horovod.tensorflow.keras": {_KERAS: "*"},
    "horovod.tensorflow.keras.callbacks": {f"{_KERAS}.callbacks": "*"},
    "horovod.tensorflow.keras.elastic": {f"{_KERAS}.elastic": "*"},
    "horovod.keras": {_KERAS: "*"},
    "horovod.keras.callbacks": {f"{_KERAS}.callbacks": "*"},
    "horovod.keras.elastic": {f"{_KERAS}.elastic": "*"},
}
"""By module: our modules, and the names that come from each: ``*`` for all public ones, ``THEIRS=OURS`` for others."""


def bindings(module: str) -> Iterator[tuple[str, str, str]]:
    """For each name of a module: Horovod's name, our module, and our name there (dotted, or ``*`` for all)."""
    for ours, names in MODULES[module].items():
        for name in names.split():
            theirs, _, own = name.partition("=")
            yield theirs, ours, own or theirs


def below(module: str) -> list[str]:
    """The modules directly in a package; empty for a module."""
    return [name for name in MODULES if name.rpartition(".")[0] == module]
