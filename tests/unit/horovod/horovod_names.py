"""What the modules of Horovod 0.28.1 hold and PyTorch scripts and libraries import."""

from __future__ import annotations

__all__ = ["THEIRS"]

THEIRS = {
    "horovod": "run __version__",
    "horovod.runner": "run",
    "horovod.runner.common.util.env": "get_env_rank_and_size",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.elastic": "State",
    "horovod.common.util": (
        "env extension_available gpu_available is_iterable is_version_greater_equal_than num_rank_is_power_2 "
        "split_list mpi_built gloo_built nccl_built ddl_built ccl_built"
    ),
    "horovod.torch": (
        "Adasum Average Compression DistributedOptimizer ProcessSet Sum SyncBatchNorm add_process_set allgather "
        "allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall "
        "alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object "
        "broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic "
        "global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce "
        "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter "
        "grouped_reducescatter_async init is_homogeneous is_initialized join local_rank local_size mpi_built "
        "mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set "
        "rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize "
        "compression functions mpi_ops optimizer sync_batch_norm"
    ),
    "horovod.torch.mpi_ops": (
        "Adasum Average HorovodInternalError ProcessSet Sum add_process_set allgather allgather_async allreduce "
        "allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ "
        "broadcast_async broadcast_async_ ccl_built cross_rank cross_size cuda_built ddl_built global_process_set "
        "gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init "
        "is_homogeneous is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
        "nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown size "
        "sparse_allreduce_async start_timeline stop_timeline synchronize"
    ),
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "ElasticSampler TorchState run sampler state",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
}

_FUNCTIONS = "allgather_object broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables"
_OPS = (
    "allgather allreduce alltoall barrier broadcast broadcast_ grouped_allgather grouped_allreduce "
    "grouped_reducescatter join local_rank_op local_size_op process_set_included_op rank_op reducescatter size_op"
)
_RANKS = (
    "init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank "
    "is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built "
    "cuda_built rocm_built Average Sum Adasum Min Max Product ProcessSet global_process_set add_process_set "
    "remove_process_set"
)
_CALLBACKS = (
    "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback "
    "BestModelCheckpoint"
)
_STATES = "KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback run"
_KERAS = (
    "DistributedOptimizer PartialDistributedOptimizer load_model allreduce allgather broadcast reducescatter "
    f"broadcast_global_variables {_RANKS}"
)

WITH_TENSORFLOW: dict[str, str] = {
    "horovod.tensorflow": (
        f"BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer "
        f"PartialDistributedGradientTape SyncBatchNormalization elastic {_OPS} {_FUNCTIONS} {_RANKS}"
    ),
    "horovod.tensorflow.util": "_executing_eagerly _make_subgraph _cache vars_to_refs refs_to_vars",
    "horovod.tensorflow.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "horovod.tensorflow.functions": _FUNCTIONS,
    "horovod.tensorflow.mpi_ops": f"{_OPS} {_RANKS}",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.elastic": "TensorFlowState TensorFlowKerasState run",
    "horovod.tensorflow.keras": f"callbacks elastic {_KERAS}",
    "horovod.tensorflow.keras.callbacks": _CALLBACKS,
    "horovod.tensorflow.keras.elastic": _STATES,
    "horovod.keras": f"callbacks elastic {_KERAS}",
    "horovod.keras.callbacks": _CALLBACKS,
    "horovod.keras.elastic": _STATES,
}
"""The names of Horovod 0.28.1 in its modules for TensorFlow and Keras, whose tests need these."""
