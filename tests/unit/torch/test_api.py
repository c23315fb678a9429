"""Horovod's names and signatures, as a literal table: a script that is ported must find each of them."""

from __future__ import annotations

import inspect
import operator

import ring_notebook.torch as hvd
from ring_notebook.core.communicator import ReduceOp

SC = "prescale_factor=1.0, postscale_factor=1.0"
PS = "process_set=global_process_set"
REDUCE = f"average=None, name=None, op=None, {SC}, {PS}"
REDUCE_COMPRESSED = f"average=None, name=None, compression=Compression.none, op=None, {SC}, {PS}"

SIGNATURES = {
    "init": "comm=None, process_sets=None",
    **dict.fromkeys(["shutdown", "is_initialized", "size", "local_size", "cross_size", "rank", "local_rank"], ""),
    **dict.fromkeys(["cross_rank", "is_homogeneous", "mpi_threads_supported", "mpi_enabled", "mpi_built"], ""),
    **dict.fromkeys(["gloo_enabled", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built"], ""),
    "rocm_built": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
    "allreduce": f"tensor, {REDUCE_COMPRESSED}",
    **dict.fromkeys(["allreduce_async", "allreduce_", "allreduce_async_"], f"tensor, {REDUCE}"),
    "grouped_allreduce": f"tensors, {REDUCE_COMPRESSED}",
    **dict.fromkeys(
        ["grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"], f"tensors, {REDUCE}"
    ),
    "sparse_allreduce_async": f"tensor, name, op, {PS}",
    **dict.fromkeys(["allgather", "allgather_async"], f"tensor, name=None, {PS}"),
    **dict.fromkeys(["grouped_allgather", "grouped_allgather_async"], f"tensors, name=None, {PS}"),
    **dict.fromkeys(
        ["broadcast", "broadcast_async", "broadcast_", "broadcast_async_"], f"tensor, root_rank, name=None, {PS}"
    ),
    **dict.fromkeys(["alltoall", "alltoall_async"], f"tensor, splits=None, name=None, {PS}"),
    "reducescatter": f"tensor, name=None, compression=Compression.none, op=Average, {PS}, {SC}",
    "reducescatter_async": f"tensor, name=None, op=Average, {PS}, {SC}",
    "grouped_reducescatter": f"tensors, name=None, compression=Compression.none, op=Average, {PS}, {SC}",
    "grouped_reducescatter_async": f"tensors, name=None, op=Average, {PS}, {SC}",
    "join": "device=-1",
    "barrier": PS,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {PS}",
    "allgather_object": f"obj, name=None, {PS}",  # the process set is ours
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, "
        # sync_every and logical are ours.
        f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {PS}, "
        "sync_every=None, logical=None"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "elastic.run": "func",
    "elastic.State": "",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.TorchState.commit": "self",
    "elastic.TorchState.save": "self",
    "elastic.TorchState.restore": "self",
    "elastic.TorchState.sync": "self",
    "elastic.TorchState.check_host_updates": "self",
    "elastic.TorchState.register_reset_callbacks": "self, callbacks",
    "elastic.TorchState.on_reset": "self",
    "elastic.TorchState.reset": "self",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.ElasticSampler.set_epoch": "self, epoch",
    "elastic.ElasticSampler.record_batch": "self, batch_idx, batch_size",
    "elastic.ElasticSampler.state_dict": "self",
    "elastic.ElasticSampler.load_state_dict": "self, state_dict",
    "elastic.ElasticSampler.reset": "self",
}

NAMES = {op.name.capitalize() for op in ReduceOp} | {"global_process_set", "Compression", "elastic", "mpi_ops"}
NAMES |= {"HorovodInternalError", "HostsUpdatedInterrupt"}

BEYOND = """
    prepare log logical_rank logical_size logical_turns track knob step save load checkpoint empty memory noise_scale
    check LARS LocalSteps LAMB only CollectiveAborted CollectiveError CollectiveMismatch CollectiveTimeout
    LinearScalingLR DistributedSampler allgather_into clip_grad_norm_ counts gather irecv isend log_params process_group
    recv scatter send
"""


def _parameters(function: object) -> str:
    """The signature without annotations, defaults by the names that they have in the package."""
    defaults = {id(hvd.Average): "Average", id(hvd.Compression.none): "Compression.none"}
    defaults[id(hvd.global_process_set)] = "global_process_set"
    shown = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        text = "**" * (parameter.kind is parameter.VAR_KEYWORD) + parameter.name
        if parameter.default is not parameter.empty:
            text += f"={defaults.get(id(parameter.default), repr(parameter.default))}"
        shown.append(text)
    return ", ".join(shown)


def test_signatures() -> None:
    assert {name: _parameters(operator.attrgetter(name)(hvd)) for name in SIGNATURES} == SIGNATURES


def test_exactly_these_names_are_public() -> None:
    assert set(hvd.__all__) == {name for name in SIGNATURES if "." not in name} | NAMES | {*BEYOND.split()}


def test_operations_are_typed() -> None:
    """So that an editor offers Average and Sum, and a type checker finds a mistyped operation."""
    functions = [value for name in hvd.__all__ if inspect.isfunction(value := getattr(hvd, name))]
    types = {function.__annotations__["op"] for function in functions if "op" in function.__annotations__}
    assert types == {"ReduceOp", "ReduceOp | None"}
    assert hvd.init.__annotations__["comm"] == "RanksOrComm | None"


def test_constants_are_horovods() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert set(vars(hvd.Compression)) >= {"none", "fp16", "bf16"}
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)
