"""DistributedOptimizer: checks its arguments and makes the optimizer for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ring_notebook.api.arguments import Reduction, check_integer, check_passes, check_predivide, check_process_set
from ring_notebook.api.local_steps import LocalSteps, settings_of
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.logical_ranks import logical_ranks, number_of
from ring_notebook.torch.collectives.tensor_arguments import check_compression, check_optimizer
from ring_notebook.torch.compression import Compression, Compressor, GradientCompression, Int8Compression
from ring_notebook.torch.optimizer.adasum_optimizer import AdasumOptimizer
from ring_notebook.torch.optimizer.gradient_reducer import GradientReducer, Grouping
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer
from ring_notebook.torch.optimizer.logical_optimizer import LogicalOptimizer
from ring_notebook.torch.optimizer.logical_reducer import LogicalReducer
from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.optimizer.wrapper import claim, original_of, wrap
from ring_notebook.torch.steps.optimizer_notes import notes_of


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Name of each parameter. Raises ValueError for duplicate or missing names, or entries that are not pairs."""
    places = {
        p: f"group {g} parameter {i}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    if named_parameters is None:
        return places
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be pairs (name, parameter), as model.named_parameters() returns them")
    doubled = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if doubled:
        raise ValueError(f"named_parameters has duplicate names: {', '.join(doubled)}")
    names = {p: name for name, p in named}
    missing = [f"{place} of shape {tuple(p.shape)}" for p, place in places.items() if p not in names]
    if missing:
        raise ValueError(f"named_parameters lacks parameters of the optimizer: {', '.join(missing)}")
    return names


def _grouping(num_groups: int, groups: Sequence[Sequence[Tensor]] | int | None) -> Grouping:
    if isinstance(groups, int):
        num_groups, groups = groups, None
    if check_integer(num_groups, "num_groups") < 0:
        raise ValueError(f"num_groups must not be negative, got {num_groups}")
    for entry in groups or ():
        if not isinstance(entry, Sequence) or not all(isinstance(p, Tensor) for p in entry):
            raise ValueError("groups must be a number, or a list of lists of parameters")
    return Grouping(num_groups, None if groups is None else [list(group) for group in groups])


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Sequence[Sequence[Tensor]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    sync_every: int | LocalSteps | None = None,
    logical: int | None = None,
) -> ReducingOptimizer | AdasumOptimizer | LocalOptimizer:
    """An optimizer of the same class as ``optimizer`` that steps on the gradients of all ranks.

    Horovod: ``DistributedOptimizer``. Gradients are grouped in buckets while backward makes them, and reduced in place.
    The result shares parameter groups and state with ``optimizer``; do not step ``optimizer`` itself any more. Several
    optimizers may share a parameter: the newest reduces its gradient for all. ``step()`` of an older one with another
    ``op`` or process set, or around the same optimizer, raises RuntimeError.

    named_parameters: ``model.named_parameters()``; the names appear in errors. Without it a parameter is named by
        its position. Raises ValueError for duplicate or missing names.
    compression: the form in which gradients are sent, see `Compression`.
    backward_passes_per_step: number of backward passes whose gradients are added up locally before they are reduced.
    op: Average, Sum, or Adasum, which combines the ranks' steps instead of their gradients, and ignores num_groups,
        groups and sparse_as_dense: a step is one dense operation.
    gradient_predivide_factor: the part of Average's division that is done before the sum, against overflow.
    num_groups, groups: parameters to reduce together: a number of equal parts, or lists of parameters. Other parameters
        share buckets of up to ``RING_FUSION_THRESHOLD`` bytes.
    sparse_as_dense: reduce sparse gradients as dense ones, instead of gathering their entries.
    process_set: the ranks that take part; on other ranks the optimizer makes local steps.
    sync_every: let each rank step on its own gradients, and reduce the differences of the weights every ``sync_every``
        steps, for links on which an allreduce at every step takes too long; see `LocalSteps` and `LocalOptimizer`. By
        default as ``%%ringtrain --sync-every`` says, else 1. Takes ``compression``, including `Compression.int8`, but
        no options about the reduction of gradients. Beyond Horovod.
    logical: the number of logical ranks that the ranks carry, see `prepare`, which also divides the data among them.
        Loop over `logical_turns`. Of the options above it takes only the first two. Beyond Horovod.

    Raises NotInitializedError before ``init()``, and TypeError or ValueError for invalid arguments.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"DistributedOptimizer: op must be Average, Sum or Adasum, got {op!r}")
    check_predivide(gradient_predivide_factor, op)
    check_optimizer(optimizer, "DistributedOptimizer")
    check_compression(compression)
    check_process_set(process_set)
    process_set.included()
    check_passes(backward_passes_per_step)
    names = _names_of(optimizer, named_parameters)
    grouping = _grouping(num_groups, groups)
    local = settings_of(sync_every)
    reducing = {
        f"op={ReduceOp(op).name.capitalize()}": op != ReduceOp.AVERAGE,
        "gradient_predivide_factor": gradient_predivide_factor != 1.0,
        "num_groups or groups": num_groups != 0 or groups is not None,
        "sparse_as_dense": sparse_as_dense,
    }
    if logical is not None:
        others = reducing | {
            "compression": compression is not Compression.none,
            "backward_passes_per_step": backward_passes_per_step != 1,
            "process_set": process_set is not global_process_set,
            "sync_every": local is not None,
        }
        if refused := [name for name, is_given in others.items() if is_given]:
            raise ValueError(
                f"logical={logical} averages gradients in one fixed order over all ranks, so it takes no "
                f"{' and no '.join(refused)}"
            )
    if local is not None:
        if given := [name for name, is_given in reducing.items() if is_given]:
            raise ValueError(f"sync_every reduces no gradients, so it takes no {' and no '.join(given)}")
        if isinstance(compression, GradientCompression) and not isinstance(compression, Int8Compression):
            raise ValueError(f"{compression!r} is for gradients, and sync_every reduces none; take Compression.int8")
        alone = wrap(LocalOptimizer, optimizer, names)
        alone.set_backward_passes_per_step(backward_passes_per_step)
        alone._prepare(local, compression, process_set)
        return claim(alone)
    notes_of(original_of(optimizer)).outer = None
    if op == ReduceOp.ADASUM:
        if isinstance(compression, GradientCompression):
            raise ValueError(
                f"op=Adasum combines steps, not gradients, so it takes no {compression!r}; take fp16 or bf16"
            )
        adasum = wrap(AdasumOptimizer, optimizer, names)
        adasum.set_backward_passes_per_step(backward_passes_per_step)
        adasum._compression, adasum._process_set = compression, process_set
        return claim(adasum)
    how = (
        Reduction(ReduceOp(op), 1.0 / gradient_predivide_factor, gradient_predivide_factor, process_set),
        compression,
        grouping,
        sparse_as_dense,
        backward_passes_per_step,
    )
    if logical is not None:
        in_turns = wrap(LogicalOptimizer, optimizer, names)
        in_turns._reducer = LogicalReducer(logical_ranks(number_of(logical)), *how)
        return claim(in_turns)
    distributed = wrap(ReducingOptimizer, optimizer, names)
    distributed._reducer = GradientReducer(*how)
    return claim(distributed)
