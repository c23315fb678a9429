"""The private names of torch that we use. Each may be absent; its comment says what happens without it.

No other file of the package uses a private name. This one loads only the name that is requested, because torch calls
`ring_notebook.torch_backend` while torch itself is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from sys import modules
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Any)

PRIVATE_NAMES = {
    # Without: env:// opens torch's own port for our ranks too.
    "rendezvous_handlers": "torch.distributed.rendezvous:_rendezvous_handlers",
    # From torch 2.15: backends that torch attaches no flight recorder to. Without: TORCH_FR_BUFFER_SIZE=0.
    "self_recording_backends": "torch.distributed.distributed_c10d:_FR_SELF_RECORDING_BACKENDS",
    # All groups, and how many have been made. Without: only the default group is known, and after init_process_group
    # has failed on a rank, its groups may have other names than on other ranks.
    "group_registry": "torch.distributed.distributed_c10d:_world",
    # Has C++ forget all groups. Without: it holds the one that an interrupted init_process_group has made.
    "unregister_groups": "torch.distributed.distributed_c10d:_unregister_all_process_groups",
    # Makes all groups. Without: the gate of a group is made in its first collective.
    "new_group_helper": "torch.distributed.distributed_c10d:_new_process_group_helper",
    # The key of the dispatcher that comes before those of devices, where torch has no kernels of collectives, and the
    # keys behind it. Without one of them: groups that torch makes have no gate.
    "before_devices": "torch._C:DispatchKey.BackendSelect",
    "keys_behind": "torch._C:_dispatch_keyset_full_after",
    # Whether a backward pass runs on this thread. Without: DistributedDataParallel's operations always go to the
    # progress thread, and its futures complete before they are returned; prepared optimizers average in `step`.
    "current_graph_task": "torch._C:_current_graph_task_id",
    # What the backward pass of this thread computes; None in functions that run at its end. Without: futures complete
    # before they are returned.
    "current_node": "torch._C:_current_autograd_node",
    # The function that calls C++ in `backward`. Without: we assume that `torch.autograd.backward` calls it itself.
    "run_backward": "torch.autograd.graph:_engine_run_backward",
    # Runs a function at the end of a backward pass. Without: futures complete before they are returned, waits of
    # DistributedDataParallel in other backends are not counted, and prepared optimizers average in `step`.
    "at_end_of_backward": "torch.autograd:Variable._execution_engine.queue_callback",
    # These three keep torch.compile out of process groups, steps and hooks. Without: torch.compiler.disable, whose
    # import takes seconds.
    "set_frame_strategy": "torch._C._dynamo:eval_frame.set_code_exec_strategy",
    "frame_action": "torch._C._dynamo:eval_frame._FrameAction",
    "frame_strategy": "torch._C._dynamo:eval_frame._FrameExecStrategy",
    # These four say what waits in other backends are for. Without: they are not counted, or counted as "wait".
    "operation_kinds": "torch._C._distributed_c10d:OpType",
    "operation_kind": "torch.distributed:Work._get_op_type",
    "functional_collectives": "torch.distributed:_functional_collectives",
    "sync_buffers": "torch.nn.parallel:DistributedDataParallel._sync_buffers",
    # Has DistributedDataParallel forget a backward pass that failed. Without: the model has to be wrapped again.
    "reset_reducer": "torch.distributed:Reducer._reset_state",
    # A pass of a loader, whose workers may have drawn more than the loop has got. Without: a snapshot in the middle of
    # a pass continues after what they have drawn, and `prepare` does not divide a loader that keeps a pass.
    "loader_passes": "torch.utils.data.dataloader:_BaseDataLoaderIter",
    # One call for many tensors. Without: one call for each.
    "multiply_each": "torch:_foreach_mul_",
    "copy_each": "torch:_foreach_copy_",
}
"""Our name, and where torch has it: a module and a path in it."""


def private(name: str) -> Any:
    """The object with the name ``name`` in `PRIVATE_NAMES`; None if this torch lacks it."""
    try:
        return resolve_name(PRIVATE_NAMES[name])
    except (ImportError, AttributeError):
        return None


def uncompiled(function: F) -> F:
    """``function``, which torch.compile no longer compiles, nor the functions that it calls."""
    leave_alone = _leave_alone()
    if leave_alone is None:
        disabled: F = import_module("torch").compiler.disable(function)
        return disabled
    leave_alone(function.__code__)  # for calls from C++
    vars(function)["_torchdynamo_disable"] = True  # for calls from compiled functions
    return function


@cache  # there is a hook for each parameter
def _leave_alone() -> Callable[[CodeType], None] | None:
    set_strategy, action, strategy = map(private, ("set_frame_strategy", "frame_action", "frame_strategy"))
    if set_strategy is None or action is None or strategy is None:
        return None
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, skip)


def in_compiled_autograd() -> bool:
    """Whether a compiled backward pass runs; False in a torch that does not say."""
    return bool(getattr(modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


def pass_of_workers(loader_pass: Any) -> tuple[Any, int, int]:
    """For a pass of a loader with workers: its sampler, and how many batches workers were given and have returned."""
    try:
        return loader_pass._index_sampler, loader_pass._send_idx, loader_pass._num_yielded
    except AttributeError:  # another torch, or a pass that is being made
        return None, 0, 0


def arguments_of(operation: Any) -> tuple[list[str], int]:
    """The names of an operation's arguments, and how many results it has; none in another torch."""
    try:
        schema = operation._schema
        return [argument.name for argument in schema.arguments], len(schema.returns)
    except AttributeError:
        return [], 0
