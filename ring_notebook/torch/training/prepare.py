"""prepare: a single-process training loop made data parallel in one line."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from ring_notebook.api.arguments import check_passes
from ring_notebook.api.basics import local_rank, size
from ring_notebook.core import world
from ring_notebook.torch.collectives.tensor_arguments import check_module, check_optimizer
from ring_notebook.torch.devices import accelerator
from ring_notebook.torch.optimizer.adasum_optimizer import AdasumOptimizer
from ring_notebook.torch.optimizer.distributed import DistributedOptimizer
from ring_notebook.torch.optimizer.fused import FusedOptimizer
from ring_notebook.torch.optimizer.reducing_optimizer import ReducingOptimizer
from ring_notebook.torch.training.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from ring_notebook.torch.training.data import batch_size_of, shard
from ring_notebook.torch.training.hyper_parameters import note_loader, note_optimizer
from ring_notebook.torch.training.noise_scale import NOISE_EVERY, measure_noise
from ring_notebook.torch.training.strategies import wrap
from ring_notebook.torch.training.sync_batch_norm import SyncBatchNorm

__all__ = ["prepare"]

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Distributed: TypeAlias = ReducingOptimizer | AdasumOptimizer | FusedOptimizer


@overload
def prepare(
    model: M,
    optimizer: torch.optim.Optimizer,
    loader: None = None,
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    strategy: None = None,
    **options: Any,
) -> tuple[M, Distributed]: ...


@overload
def prepare(
    model: M,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[T],
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    strategy: None = None,
    **options: Any,
) -> tuple[M, Distributed, DataLoader[T]]: ...


@overload
def prepare(
    model: torch.nn.Module,
    optimizer: O,
    loader: None = None,
    *,
    scale_lr: bool = False,
    strategy: Literal["ddp", "fsdp"],
) -> tuple[torch.nn.Module, O]: ...


@overload
def prepare(
    model: torch.nn.Module,
    optimizer: O,
    loader: DataLoader[T],
    *,
    scale_lr: bool = False,
    strategy: Literal["ddp", "fsdp"],
) -> tuple[torch.nn.Module, O, DataLoader[T]]: ...


def prepare(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: Any = None,
    *,
    scale_lr: bool = False,
    noise_scale: bool | int = False,
    accumulate: int = 1,
    strategy: str | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Make a single-process training loop data parallel; all ranks must call this. Beyond Horovod.

    Returns ``(model, optimizer, loader)``, without a loader ``(model, optimizer)``, to use in place of the arguments:

    - the model itself, on this rank's device, with the values of rank 0;
    - a `DistributedOptimizer` of the same class as ``optimizer``, whose state and parameter groups it shares, with the
      state of rank 0;
    - a DataLoader with this rank's share of the data in batches of the same size, reshuffled in every pass if
      ``loader`` shuffles; on a GPU from pinned memory, so that ``x.to("cuda", non_blocking=True)`` does not wait.

    Layers of torch.nn.SyncBatchNorm become `SyncBatchNorm`: torch's own need a GPU and a group of torch.distributed,
    and keep to their own rank without one. With a ``strategy``, which makes that group, they stay on GPUs.
    The batch of a step is ``size()`` times as large as that of one process. May be called again on what it returned,
    and for each of several models with optimizers of their own, such as those of a GAN.

    scale_lr: multiply the learning rates by ``size()`` (Goyal et al. 2017), once per optimizer. Make learning rate
        schedules afterwards, since they keep the rates that they find (there is a warning).
    noise_scale: measure the gradient noise scale, see `noise_scale`, in every 10th step, or in every so many, and add
        it as ``noise_scale`` to every row that is logged.
    accumulate: make one step of so many batches, with the mean of their gradients: ``optimizer.step()`` and
        ``zero_grad()`` do nothing between them, so that the loop stays as it is.
    strategy: "ddp" or "fsdp" wrap the model as torch.distributed has it, in DistributedDataParallel or FSDP2's
        ``fully_shard``, on `process_group`; the optimizer is then ``optimizer`` itself, on the parameters of that.
    options: keyword arguments of `DistributedOptimizer`; there are none with a ``strategy``.

    Raises NotInitializedError before ``init()``, TypeError for other arguments than a module, an optimizer and a
    DataLoader, ValueError for a ``noise_scale`` with a ``loader`` of unknown batch size, and TypeError for a
    ``noise_scale`` or ``accumulate`` with ``fused=True``, ``op=Adasum`` or a ``strategy``.
    """
    check_module(model, "prepare")
    check_optimizer(optimizer, "prepare")
    check_passes(accumulate)
    device = accelerator()
    if device is None or strategy is None:
        model = SyncBatchNorm.convert_torchs(model)
    share = None if loader is None else shard(loader, pin_memory=device is not None)
    if device is not None:
        _move(model, _own_device(device))
    broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
    broadcast_optimizer_state(optimizer, root_rank=0)
    if scale_lr:
        _scale_rates(optimizer)
    note_optimizer(optimizer)
    note_loader(loader)
    if strategy is not None:
        if options or noise_scale or accumulate != 1:
            own = {"noise_scale": noise_scale, "accumulate": accumulate != 1}
            given = ", ".join([*options, *(name for name, used in own.items() if used)])
            raise TypeError(f"prepare(strategy={strategy!r}) takes no options of DistributedOptimizer, got {given}")
        prepared = wrap(model, optimizer, strategy), optimizer
        return prepared if loader is None else (*prepared, share)
    options.setdefault("named_parameters", model.named_parameters())
    distributed = DistributedOptimizer(optimizer, **options)
    if isinstance(distributed, ReducingOptimizer):
        distributed._reducer.batch_size = None if loader is None else batch_size_of(loader)
        if accumulate != distributed._micro_batches:
            distributed.accumulate(accumulate)
    elif accumulate != 1:
        raise TypeError("prepare(accumulate=...) takes no optimizer with fused=True or op=Adasum; leave these out")
    if noise_scale:
        measure_noise(distributed, NOISE_EVERY if noise_scale is True else noise_scale)
    return (model, distributed) if loader is None else (model, distributed, share)


def _own_device(kind: str) -> torch.device:
    """The device that ``cuda``, or another ``kind``, means for this rank."""
    module = getattr(torch, kind)
    if world.current().run is None:  # in an engine the rank's own GPU is the first; in a script all see the same first
        module.set_device(local_rank() % module.device_count())
    return torch.device(kind, module.current_device())


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move ``model`` unless it is there: torch can be told to replace what it moves, which weak references forbid."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)


def _scale_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        # The factor stays in the group: a cell that is run again does not scale again.
        factor = size() / group.get("lr_scale", 1)
        group["lr_scale"] = size()
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
            if factor != 1:
                warnings.warn(
                    "prepare(scale_lr=True) was called after a learning rate schedule was made, which keeps the rates "
                    "that it found; make the schedule after prepare()",
                    stacklevel=3,
                )
