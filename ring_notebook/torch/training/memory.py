"""memory: what a training will need on this rank, before it starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ring_notebook.api.basics import local_size, size
from ring_notebook.core.metrics import expect_load
from ring_notebook.core.native import core
from ring_notebook.torch.collectives.tensor_arguments import check_module, check_optimizer
from ring_notebook.torch.optimizer.wrapper import original_of
from ring_notebook.torch.tensors import is_sharded, parts_of
from ring_notebook.torch.training.fsdp_units import sharded_units
from ring_notebook.torch.training.prepare import check_strategy

_ROWS = (2, 3)
"""Rows of a batch in the two measured forward passes. Batch normalization may refuse a single one."""
_SAMPLE = 1 << 22  # most elements of a parameter with which to try an optimizer that needs memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank. Its text names them, in GB, and says whether they fit."""

    weights: int
    """Parameters and buffers; also the blocks of a sharded model that are gathered at one time."""
    gradients: int
    optimizer: int
    activations: int
    """Tensors that forward keeps for backward: an estimate, from a few rows of the batch; 0 without a batch."""
    available: int
    """Bytes that this rank may have: its device's free memory, or its share of the host's, plus what it holds."""

    @property
    def total(self) -> int:
        """The sum, which a step may need at its peak; temporary tensors of single operations come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        (unit, name), (unit_there, name_there) = _unit(self.total), _unit(self.available)
        parts = [("weights", self.weights), ("gradients", self.gradients), ("optimizer", self.optimizer)]
        listed = ", ".join(f"{part} {_number(amount / unit)}" for part, amount in parts)
        about = f", activations about {_number(self.activations / unit)}" if self.activations else ""
        available = _number(self.available / unit_there) + f" {name_there}" * (name_there != name)
        text = f"{_number(self.total / unit)} {name} of {available}: {listed}{about}"
        if self.total <= self.available:
            return text
        return (
            f"{text}. It does not fit: take fewer rows, gradient checkpointing, an adapter (LoRA), or share the model "
            "among more ranks with prepare(strategy='fsdp')"
        )


def memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
    *,
    strategy: str | None = None,
) -> Memory:
    """What a training step of ``model`` needs on this rank, in bytes; ``print`` it, before or after `prepare`.

    Weights and gradients are counted; frozen parameters have no gradients. The state of ``optimizer`` is its present
    state, or the state after a first step, which is tried without memory. With ``batch``, a step's arguments to the
    model (one tensor, a tuple, or a dict of keywords), forward runs with two and with three of its rows, and the
    tensors kept for backward are scaled to all rows: an estimate without temporary tensors. The weights stay.

    strategy: "fsdp" divides weights, gradients and state by ``size()``, for a model that is not sharded yet; a block is
        whole while it computes. A sharded model is counted as it is.

    The text is recorded with the run. Beyond Horovod. No collective, except that all ranks must call this for a sharded
    model, and with a batch for one that has `SyncBatchNorm`. Raises TypeError for anything but a module and an
    optimizer, ValueError for an unknown strategy, NotInitializedError before ``init()``.
    """
    check_module(model, "memory")
    if optimizer is not None:
        check_optimizer(optimizer, "memory")
    if strategy is not None:
        check_strategy(strategy)
    ranks = size()
    divided = ranks if strategy == "fsdp" and not any(map(is_sharded, model.parameters())) else 1
    weights = _weights(model)
    gathered = _gathered(model) if divided > 1 or any(map(is_sharded, model.parameters())) else 0
    gradients = sum(_bytes([one]) for one in _local(one for one in model.parameters() if one.requires_grad))
    state = 0 if optimizer is None else _state(original_of(optimizer))
    held = weights + sum(_bytes(_local([one.grad])) for one in model.parameters() if one.grad is not None)
    if optimizer is not None:
        held += _bytes(_tensors(list(original_of(optimizer).state.values())))
    found = Memory(
        weights=-(-weights // divided) + gathered,
        gradients=-(-gradients // divided),
        optimizer=-(-state // divided),
        activations=0 if batch is None else _activations(model, batch),
        available=_free(model) + held,
    )
    expect_load(**_expected(model, found.total - held))
    return found


def _unit(amount: int) -> tuple[float, str]:
    return next((one for one in ((1e9, "GB"), (1e6, "MB")) if amount >= one[0]), (1e3, "kB"))


def _number(amount: float) -> str:
    return f"{amount:.1f}" if amount < 10 else f"{amount:.0f}"


def _weights(model: nn.Module) -> int:
    return _bytes(_local([*model.parameters(), *model.buffers()]))


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    """This rank's share of each tensor, in parts."""
    shares = (one.to_local() if is_sharded(one) else one for one in tensors)
    return [part for share in shares for _, part in parts_of("", share)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of ``tensors``; memory that they share, such as of tied weights, counts once."""
    seen = {}
    for one in tensors:
        seen[id(one) if one.is_meta else (str(one.device), one.data_ptr())] = one.numel() * one.element_size()
    return sum(seen.values())


def _gathered(model: nn.Module) -> int:
    """Bytes of the two largest units of a sharded model: one computes, and the next one is gathered."""
    units = sharded_units(model)
    within = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in within]
    sizes = sorted(sum(one.numel() * one.element_size() for one in unit.parameters()) for unit in units)
    return sum(sizes[-2:]) + sum(one.numel() * one.element_size() for one in rest)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from _local([value])
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that ``optimizer`` has, or will have after a step."""
    total = 0
    for group in optimizer.param_groups:
        sizes: dict[Any, int] = {}
        trained = [one for one in group["params"] if one.requires_grad]
        total += _bytes(_tensors([optimizer.state[one] for one in trained if optimizer.state.get(one)]))
        for one in trained:
            if not optimizer.state.get(one):
                own = one.to_local() if is_sharded(one) else one
                alike = own.shape, own.dtype
                if alike not in sizes:
                    sizes[alike] = _state_of(optimizer, group, own)
                total += sizes[alike]
    return total


def _state_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    """Bytes of the state of one parameter after a step, tried on a parameter of its shape without memory."""
    try:
        return _bytes(_tried(optimizer, group, torch.zeros(parameter.shape, dtype=parameter.dtype, device="meta")))
    except Exception:  # an optimizer with kernels of its own needs memory
        rows = len(parameter) if parameter.dim() else 1
        few = max(1, rows * _SAMPLE // max(parameter.numel(), _SAMPLE))  # all rows, or as many as are cheap
        sample = torch.zeros_like(parameter[:few] if parameter.dim() else parameter, requires_grad=False)
        return _bytes(_tried(optimizer, group, sample)) * rows // few


def _tried(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Tensor) -> list[Tensor]:
    parameter = nn.Parameter(values)
    parameter.grad = torch.zeros_like(values)
    twin = object.__new__(type(optimizer))
    notes = {name for name in optimizer.__dict__ if name == "step" or name.startswith("_ring_")}
    # Copy dicts: 8-bit optimizers have tables of codes there, which they move to the device of a parameter.
    shared = {name: value for name, value in optimizer.__dict__.items() if name not in notes}
    twin.__dict__.update({name: copy(value) if isinstance(value, dict) else value for name, value in shared.items()})
    # ``is_stepping`` keeps the hooks of `ring_notebook.torch.steps` off this step.
    twin.__dict__.update(state=defaultdict(dict), param_groups=[{**group, "params": [parameter]}], is_stepping=True)
    twin.step(lambda: 0.0)
    return list(_tensors(list(twin.state.values())))


def _activations(model: nn.Module, batch: Any) -> int:
    """Bytes that forward keeps for backward with the whole batch, by the difference that a row makes."""
    rows = next((len(one) for one in _inputs(batch) if one.dim()), 0)
    if rows <= _ROWS[-1]:
        return _kept(model, batch)
    fewer, more = (_kept(model, _first(batch, rows, few)) for few in _ROWS)
    return fewer + (rows - _ROWS[0]) * (more - fewer)


def _inputs(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
    return [value for value in values if isinstance(value, Tensor)]


def _first(batch: Any, rows: int, few: int) -> Any:
    def cut(value: Any) -> Any:
        return value[:few] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value

    if isinstance(batch, Mapping):
        return {name: cut(value) for name, value in batch.items()}
    return [cut(value) for value in batch] if isinstance(batch, Sequence) else cut(batch)


def _kept(model: nn.Module, batch: Any) -> int:
    """Bytes of the tensors that forward saves, without weights and the batch itself."""
    known = {part.untyped_storage().data_ptr() for part in [*_local([*model.parameters(), *model.buffers()])]}
    known |= {one.untyped_storage().data_ptr() for one in _inputs(batch)}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # so that its address is not reused
        return tensor

    with _untouched(model), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if isinstance(batch, Mapping):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, Sequence) else model(batch)
    del result
    return sum(saved.values())


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """A context that restores buffers, such as a batch norm's, and random numbers."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({one.device for one in model.parameters() if one.is_cuda}, key=str)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _free(model: nn.Module) -> int:
    device = _device(model)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _cached(device)
    return int(min(core.memory_left(), psutil.virtual_memory().available)) // local_size()


def _expected(model: nn.Module, more: int) -> dict[str, float]:
    """The memory in use on the device of ``model`` plus ``more`` bytes, under its name in `records.Load`."""
    device = _device(model)
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return {"gpu_memory_expected": float(whole - free - _cached(device) + more)}
    return {"memory_expected": float(psutil.Process().memory_info().rss + more)}


def _device(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def _cached(device: torch.device) -> int:
    """Bytes of the device that torch caches."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
