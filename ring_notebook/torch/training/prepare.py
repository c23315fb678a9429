"""prepare: a single-process training loop made data parallel in one line, or wrapped by torch's own wrappers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ring_notebook.api.arguments import check_passes
from ring_notebook.api.basics import local_rank, size
from ring_notebook.api.objects import without_others
from ring_notebook.api.preparation import by_kind, in_order, of_another
from ring_notebook.core import world
from ring_notebook.core.logical_ranks import LogicalRanks, logical_ranks, number_of
from ring_notebook.core.metrics import note_params
from ring_notebook.torch.devices import accelerator
from ring_notebook.torch.optimizer.adasum_optimizer import AdasumOptimizer
from ring_notebook.torch.optimizer.distributed import DistributedOptimizer
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer, end_rounds
from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.optimizer.unoptimized_gradients import average_rest
from ring_notebook.torch.optimizer.wrapper import original_of, parameters_of
from ring_notebook.torch.process_group.default_group import process_group
from ring_notebook.torch.steps.optimizer_knobs import RATES, add_knobs, scale_schedules
from ring_notebook.torch.steps.optimizer_notes import notes_of
from ring_notebook.torch.steps.repair import furthest
from ring_notebook.torch.tensors import is_sharded
from ring_notebook.torch.training.broadcast_state import broadcast_optimizer_state, broadcast_tensors
from ring_notebook.torch.training.fsdp_units import sharded_units
from ring_notebook.torch.training.loaders import batch_size_of, shard
from ring_notebook.torch.training.noise_scale import NOISE_EVERY, measure_noise
from ring_notebook.torch.training.sync_batch_norm import SyncBatchNorm
from ring_notebook.torch.training.turn_state import begin_turns, follow_buffers
from ring_notebook.torch.training.turns_loader import shard_by_turns

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Distributed: TypeAlias = ReducingOptimizer | AdasumOptimizer | LocalOptimizer
_KINDS: dict[str, Callable[[Any], bool]] = {
    "models": lambda one: isinstance(one, torch.nn.Module),
    "optimizers": lambda one: isinstance(one, torch.optim.Optimizer),
    "loaders": lambda one: isinstance(one, DataLoader),
    "learning rate schedulers": lambda one: isinstance(one, LRScheduler),
}


@overload
def prepare(
    model: M,
    optimizer: torch.optim.Optimizer,
    /,
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    logical: int | None = None,
    strategy: None = None,
    **options: Any,
) -> tuple[M, Distributed]: ...


@overload
def prepare(
    model: M,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[T],
    /,
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    logical: int | None = None,
    strategy: None = None,
    **options: Any,
) -> tuple[M, Distributed, DataLoader[T]]: ...


@overload
def prepare(
    model: torch.nn.Module,
    optimizer: O,
    /,
    *,
    scale_lr: bool = False,
    strategy: Literal["ddp", "fsdp"],
) -> tuple[torch.nn.Module, O]: ...


@overload
def prepare(
    model: torch.nn.Module,
    optimizer: O,
    loader: DataLoader[T],
    /,
    *,
    scale_lr: bool = False,
    strategy: Literal["ddp", "fsdp"],
) -> tuple[torch.nn.Module, O, DataLoader[T]]: ...


@overload
def prepare(
    *objects: Any,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    logical: int | None = None,
    strategy: Literal["ddp", "fsdp"] | None = None,
    **options: Any,
) -> Any: ...


def prepare(
    *objects: Any,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    logical: int | None = None,
    strategy: str | None = None,
    **options: Any,
) -> Any:
    """Make a single-process training loop data parallel; all ranks must call this. Beyond Horovod.

    Takes models, optimizers, loaders and learning rate schedulers, any number of each in any order, and returns their
    replacements in that order, as a tuple; for a single object, its replacement alone:

    - the model itself, on this rank's device, with the values of rank 0 (after a failed run: of the rank that has made
      the most steps);
    - a `DistributedOptimizer` of the same class as the optimizer, whose state and parameter groups it shares, with the
      state of that rank;
    - a DataLoader with this rank's share of the data in batches of the same size, reshuffled in every pass if the
      loader shuffles, and on this rank's device;
    - the scheduler itself, which sets the rates of the returned optimizer too.

    Layers of torch.nn.SyncBatchNorm become `SyncBatchNorm`: torch's own need a GPU and a group of torch.distributed,
    and synchronize nothing without one. With a ``strategy``, which makes that group, they are kept on GPUs.
    In a notebook the learning rate, weight decay and momentum of its optimizers are knobs, see `knob`.
    The batch of a step is ``size()`` times as large as that of one process. May be called again on its results.

    scale_lr: multiply the learning rates by ``size()`` (Goyal et al. 2017), once per optimizer. Schedulers keep the
        rates that they find: pass them too, or make them afterwards (there is a warning).
    noise_scale: measure the gradient noise scale, see `noise_scale`, in every 10th step, or in every
        ``noise_scale``-th, and add it as ``noise_scale`` to every row that is logged. Takes one optimizer.
    accumulate: make one step of this many batches, with the mean of their gradients, without a change of the loop: the
        other calls of ``optimizer.step()`` keep the gradients of their batch, which ``zero_grad()`` then leaves alone,
        and a GradScaler's ``update()`` waits for the step. Takes no ``step(closure)``.
    logical: train as this number of ranks would, on any number of ranks up to it: losses, weights and optimizer state
        are the same bits (``docs/logical-ranks.md``). Each rank carries its part of the logical ranks, whose batches
        the loader yields in turn; ``optimizer.step()``, schedules and a GradScaler act in the last turn. Torch then
        computes with one thread in each rank. By default as ``ringrun --logical`` says, else none.
    strategy: "ddp" or "fsdp" wrap the model in torch's DistributedDataParallel or FSDP2's ``fully_shard``, on
        `process_group`; the returned optimizer is then the one that was passed, on the wrapped model's parameters.
        Takes one model and its optimizers.
    options: keyword arguments of `DistributedOptimizer`, such as ``sync_every=50`` for local steps; not with a
        ``strategy``. A call ends a round of local steps that is under way, by a sync.

    Objects of Keras or JAX go to `prepare` of their face, whichever is imported.

    Raises NotInitializedError before ``init()``; TypeError, which names the argument, for any other object; ValueError
    for an optimizer of a model that is not passed (with a ``strategy``: of any other parameters), for loaders over
    different samples on the ranks, for ``noise_scale`` with a loader of unknown batch size, and for more ranks than
    ``logical``; TypeError for ``noise_scale`` or ``accumulate`` with ``op=Adasum``, a ``strategy`` or ``logical``, and
    for ``logical`` with a ``strategy`` or `SyncBatchNorm`.
    """
    if another := of_another("prepare", objects, "torch"):
        own_options = {
            "noise_scale": (noise_scale, False),
            "accumulate": (accumulate, 1),
            "strategy": (strategy, None),
            "logical": (logical, None),
        }
        given = {name: value for name, (value, default) in own_options.items() if value != default}
        if "sync_every" in options:
            raise TypeError("prepare(sync_every=...) is for PyTorch: no other framework has local steps here")
        return another(*objects, scale_lr=scale_lr, **given, **options)
    in_turns = _in_turns(logical, noise_scale, accumulate, strategy)
    if in_turns is None:
        return _prepare(objects, None, scale_lr, noise_scale, accumulate, strategy, options)
    with without_others() if world.is_joining() else nullcontext():  # the other ranks are training, and sync later
        return _prepare(objects, in_turns, scale_lr, False, 1, None, options | {"logical": in_turns.number})


def _prepare(
    objects: tuple[Any, ...],
    in_turns: LogicalRanks | None,
    scale_lr: bool,
    noise_scale: bool | int,
    accumulate: int,
    strategy: str | None,
    options: dict[str, Any],
) -> Any:
    models, optimizers, loaders, schedulers = by_kind(objects, _KINDS).values()
    _check_options(models, optimizers, noise_scale, accumulate, strategy, options)
    for model in models:
        _check_device_map(model)
        if in_turns is not None:
            _check_statistics(model, in_turns)
    device = accelerator()
    prepared: dict[int, Any] = {id(one): one for one in objects}
    for model in models:
        converted = model if device is not None and strategy else SyncBatchNorm.convert_torchs(model)
        if device is not None:
            _move(converted, _own_device(device))
        prepared[id(model)] = converted
    if in_turns is not None:
        begin_turns(in_turns)
    for number, loader in enumerate(loaders):
        if in_turns is None:
            prepared[id(loader)] = shard(loader, kind=device, number=number)
        else:
            prepared[id(loader)] = shard_by_turns(loader, in_turns, kind=device, number=number)
        note_loader(loader, trains=bool(optimizers) and number == 0)
    # Unwrapped, because a restarted rank has a new model without a wrapper.
    inner = [unwrapped(prepared[id(model)]) for model in models]
    names = _names_of_parameters(inner)
    batch = batch_size_of(loaders[0]) if loaders else None
    root = furthest([original_of(optimizer) for optimizer in optimizers])
    root, lacking = end_rounds([original_of(optimizer) for optimizer in optimizers], root)
    for own in inner:
        tensors = [*own.named_parameters(), *own.named_buffers()]
        broadcast_tensors([pair for pair in tensors if not is_sharded(pair[1])], root_rank=root)
        if in_turns is not None:
            follow_buffers(in_turns, own)
    for optimizer, lacks_outer in zip(optimizers, lacking, strict=True):
        own_schedulers = [one for one in schedulers if original_of(one.optimizer) is original_of(optimizer)]
        notes_of(original_of(optimizer)).refer(inner, own_schedulers)
        if not any(is_sharded(parameter) for parameter in parameters_of(optimizer)):
            broadcast_optimizer_state(optimizer, root_rank=root)
        if scale_lr:
            scale_rates(optimizer, own_schedulers, size() if in_turns is None else in_turns.number)
        note_optimizer(optimizer)
        if accumulate > 1:
            note_params(accumulate=accumulate)
        add_knobs(original_of(optimizer))
        if strategy is None:
            made = prepared[id(optimizer)] = _distributed(optimizer, names, batch, noise_scale, accumulate, options)
            if lacks_outer and isinstance(made, LocalOptimizer):
                made.take_outer(root)
            made.same_step.compares = not isinstance(made, AdasumOptimizer)
    if strategy is None and optimizers:
        average_rest(inner, [prepared[id(optimizer)] for optimizer in optimizers])
    if strategy is not None:
        prepared[id(models[0])] = wrap(prepared[id(models[0])], optimizers, strategy)
    return in_order(objects, prepared)


def _check_options(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    noise_scale: bool | int,
    accumulate: int,
    strategy: str | None,
    options: dict[str, Any],
) -> None:
    """Raise for options that contradict each other, before anything is changed."""
    check_passes(accumulate)
    if noise_scale and len(optimizers) != 1:
        raise TypeError(f"prepare(noise_scale=...) takes one optimizer, got {len(optimizers)}")
    if strategy is None:
        return
    if len(models) != 1 or not optimizers:
        raise TypeError(
            f"prepare(strategy={strategy!r}) takes one model and its optimizers, got {len(models)} and "
            f"{len(optimizers)}; call it once for each model"
        )
    if options or noise_scale or accumulate != 1:
        own = {"noise_scale": noise_scale, "accumulate": accumulate != 1}
        given = ", ".join([*options, *(name for name, used in own.items() if used)])
        raise TypeError(f"prepare(strategy={strategy!r}) takes no options of DistributedOptimizer, got {given}")


def _check_device_map(model: nn.Module) -> None:
    """Raise ValueError for a model that ``device_map`` of Hugging Face has put on several devices."""
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise ValueError(
            f"rank {world.current().rank}: device_map has put parts of the model on devices {', '.join(places)}, and a "
            "rank computes on one device: load the model without device_map. If it does not fit there, load it in 4 "
            "bits (BitsAndBytesConfig), or share it among the ranks with prepare(strategy='fsdp')"
        )


def _in_turns(
    logical: int | None, noise_scale: bool | int, accumulate: int, strategy: str | None
) -> LogicalRanks | None:
    """The logical ranks asked for, if any. Raises TypeError for options that they exclude."""
    if not (number := number_of(logical)):
        return None
    given = {"noise_scale": bool(noise_scale), "accumulate": accumulate != 1, "strategy": strategy is not None}
    if refused := [name for name, is_given in given.items() if is_given]:
        raise TypeError(
            f"prepare(logical={number}) takes no {' and no '.join(refused)}"
            + ("; take more logical ranks in place of micro-batches" if accumulate != 1 else "")
        )
    return logical_ranks(number)


def _check_statistics(model: torch.nn.Module, in_turns: LogicalRanks) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm | SyncBatchNorm):
            raise TypeError(
                f"prepare(logical={in_turns.number}) takes no SyncBatchNorm (module {name}): its statistics are of "
                "all ranks, so the bits would depend on their number; take BatchNorm1d (2d, 3d), whose statistics are "
                "those of a logical rank, or GroupNorm"
            )


def _names_of_parameters(models: Sequence[torch.nn.Module]) -> dict[Tensor, str]:
    """The name of each parameter; with several models it begins with the number of the model."""
    names: dict[Tensor, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, name if len(models) == 1 else f"model {number}: {name}")
    return names


def _distributed(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    batch: int | None,
    noise_scale: bool | int,
    accumulate: int,
    options: dict[str, Any],
) -> Distributed:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if names and not any(parameter in names for parameter in own):
        raise ValueError(
            f"prepare: {type(optimizer).__name__} has no parameter of the models that were passed; pass its model too, "
            "and make the optimizer from the parameters of that model"
        )
    named = {"named_parameters": [(names[one], one) for one in own]} if all(one in names for one in own) else {}
    distributed = DistributedOptimizer(optimizer, **{**named, **options})
    if isinstance(distributed, ReducingOptimizer):
        distributed._reducer.batch_size = batch
    if isinstance(distributed, ReducingOptimizer | LocalOptimizer):
        if accumulate != distributed._micro_batches:
            distributed.accumulate(accumulate)
    elif accumulate != 1:
        raise TypeError("prepare(accumulate=...) takes no optimizer with op=Adasum; leave one of the two out")
    if noise_scale:
        measure_noise(distributed, NOISE_EVERY if noise_scale is True else noise_scale)
    return distributed


def _own_device(kind: str) -> torch.device:
    """This rank's device of ``kind``, such as "cuda"."""
    module = getattr(torch, kind)
    if world.current().run is None:  # a script: all ranks see the same GPUs; an engine's own GPU is its first
        module.set_device(local_rank() % module.device_count())
    return torch.device(kind, module.current_device())


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move ``model`` unless it is there: a move may replace parameters, which fails if they have weak references."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)


def scale_rates(optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler], ranks: int) -> None:
    """Multiply the rates of ``optimizer``, and the copies of them in ``schedulers``, by the number of ``ranks``."""
    factor = 1.0
    for group in optimizer.param_groups:
        # The factor stays in the group: a cell that is run again does not scale again.
        factor = ranks / group.get("lr_scale", 1)
        group["lr_scale"] = ranks
        for rate in RATES & group.keys():
            group[rate] *= factor
        if "initial_lr" in group and factor != 1 and not schedulers:
            warnings.warn(
                "prepare(scale_lr=True) was called after a learning rate schedule was made, which keeps the rates "
                "that it found; pass the scheduler to prepare() too, or make it after prepare()",
                stacklevel=3,
            )
    scale_schedules(optimizer, schedulers, factor)


# Options of a parameter group that are recorded; switches only if they are on.
_OPTIONS = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "alpha", "amsgrad")


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Record the class of an optimizer and the options of its first group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    options = {name: group[name] for name in _OPTIONS if group.get(name)}
    note_params(optimizer=_class_of(optimizer), **options)


def note_loader(loader: Any, trains: bool) -> None:
    """Record the loader's batch size, if it has one. A loader that ``trains`` replaces another's value."""
    if batch := getattr(loader, "batch_size", None):
        note_params(trains, batch_size=batch)


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of the optimizer's class as the user wrote it, also for a distributed optimizer."""
    return type(original_of(optimizer)).__name__


def check_strategy(strategy: str) -> None:
    """Raise ValueError for an unknown strategy."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be {' or '.join(map(repr, STRATEGIES))}, got {strategy!r}")


def wrap(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], strategy: str) -> nn.Module:
    """``model`` wrapped by ``strategy``; ``optimizers`` update the parameters of the wrapped model.

    Raises ValueError for an unknown strategy, for an optimizer of other parameters, which the wrapper would not
    average, and for one with state that cannot be sharded as the parameters.
    """
    check_strategy(strategy)
    own = set(model.parameters())
    for optimizer in optimizers:
        known = list(parameters_of(optimizer))
        if others := sum(one not in own for one in known):
            raise ValueError(
                f"prepare(strategy={strategy!r}): {others} of {len(known)} parameters of {_class_of(optimizer)} "
                "are not in the model, so the ranks would not average their gradients: add them to the model "
                "(register_parameter), or leave the strategy out"
            )
    backend = "nccl" if any(parameter.is_cuda for parameter in model.parameters()) else None
    process_group(backend)
    return STRATEGIES[strategy](model, optimizers)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel; any other model itself."""
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def _ddp(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    if model is not unwrapped(model) and world.disruptions() == 0 and not _unfrozen(model):  # the cell was run again
        return model
    model = unwrapped(model)  # a failed pass leaves the wrapper unusable in a torch that cannot reset it
    # With gradients as views of the buckets, no gradient is copied.
    wrapper: Any = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapper._ring_frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    found = weakref.ref(wrapper)  # the optimizers may outlive it

    def check(*_: Any) -> None:
        if unfrozen := _unfrozen(found()):
            raise RuntimeError(
                f"rank {world.current().rank}: {unfrozen[0]}{' and others' * (len(unfrozen) > 1)} got requires_grad "
                "after prepare(strategy='ddp'), and DistributedDataParallel averages no gradients of it: call prepare "
                "again"
            )

    for one in optimizers:
        if before := getattr(one, "_ring_check_unfrozen", None):
            before.remove()
        one._ring_check_unfrozen = one.register_step_pre_hook(check)  # type: ignore[attr-defined]
    return cast("nn.Module", wrapper)


def _unfrozen(wrapper: Any) -> list[str]:
    """The parameters that were frozen when the DistributedDataParallel was made, and now train."""
    return [name for name, one in getattr(wrapper, "_ring_frozen", ()) if one.requires_grad]


def _fsdp(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if isinstance(model, FSDPModule):
        return model
    for parameter, state in (pair for optimizer in optimizers for pair in optimizer.state.items()):
        if any(isinstance(one, Tensor) and one.numel() > 1 and one.shape != parameter.shape for one in state.values()):
            raise ValueError(
                "prepare(strategy='fsdp') shards the parameters, and the optimizer has state of another shape than "
                "theirs already; make a new optimizer, and load the state afterwards with torch.distributed.checkpoint"
            )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in sharded_units(model):
        fully_shard(unit)
    fully_shard(model)
    if hasattr(model, "generate"):  # transformers' and peft's calls the inner model, which does not gather
        register_fsdp_forward_method(model, "generate")
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "ring":
            module.set_allocate_memory_from_process_group_for_comm(True)  # its buffers lie in ring memory
    sharded: dict[str, Any] = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            whole = group["params"]
            group["params"] = [sharded[names[id(parameter)]] for parameter in whole]
            for parameter, new in zip(whole, group["params"], strict=True):
                if state := optimizer.state.pop(parameter, None):
                    optimizer.state[new] = {name: sharded_as(new, one) for name, one in state.items()}
    return model


def sharded_as(parameter: Any, state: Any) -> Any:
    """``state``, equal on all ranks, sharded like ``parameter``; unchanged if it has another shape."""
    from torch.distributed.tensor import distribute_tensor  # sharded tensors take a second to import

    same = isinstance(state, Tensor) and not is_sharded(state) and state.dim() and state.shape == parameter.shape
    return distribute_tensor(state, parameter.device_mesh, parameter.placements, src_data_rank=None) if same else state


STRATEGIES = {"ddp": _ddp, "fsdp": _fsdp}
