"""Keeps torch's objects and our wrappers in snapshots: memory once, optimizers wrapped, loaders at their position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ring_notebook.core.kept_state import Keeper, Memory
from ring_notebook.torch.optimizer.unoptimized_gradients import average_rest, models_beside
from ring_notebook.torch.optimizer.wrapper import Wrapper, put_kept, wrap
from ring_notebook.torch.steps.optimizer_notes import notes_of
from ring_notebook.torch.tensors import is_sharded
from ring_notebook.torch.training.rank_shares import DistributedSampler
from ring_notebook.torch.training.turn_state import for_snapshot, from_snapshot

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class TorchKeeper(Keeper):
    """torch's objects for `ring_notebook.core.kept_state`: see `Keeper`."""

    name = "torch"

    def memory_of(self, value: Any) -> Memory | None:
        """The memory of a storage, which its tensors share."""
        if not isinstance(value, torch.UntypedStorage):
            return None
        device = str(value.device)
        return Memory((device, value.data_ptr(), value.nbytes()), lambda: _bytes_of(value), device)

    def with_memory(self, size: int, fill: Callable[[memoryview], object], about: Any) -> Any:
        """A storage on its old device."""
        storage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        if size:
            fill(_bytes_of(storage))
        return storage if about == "cpu" else storage.to(device=torch.device(about))

    def reduced(self, value: Any) -> Any:
        """Tensors as views of their storages; optimizers and samplers with attributes that pickle would lose."""
        if isinstance(value, Tensor):
            return _reduced_tensor(value)
        if isinstance(value, Wrapper):
            return _reduced_wrapper(value)
        if isinstance(value, torch.optim.Optimizer):
            return _reduced_optimizer(value)
        if isinstance(value, DistributedSampler):
            return object.__new__, (type(value),), value.kept()
        if isinstance(value, nn.parallel.DistributedDataParallel):
            return _itself, (value.module,)
        return NotImplemented

    def unkeepable(self, value: Any) -> str:
        """Objects of a GPU's context or of a group of processes."""
        if isinstance(value, torch.cuda.Stream | torch.cuda.Event | torch.cuda.CUDAGraph):
            return f"a {type(value).__name__} of CUDA"
        if isinstance(value, Tensor) and is_sharded(value):
            return "a tensor that is sharded over ranks (`ring.checkpoint` keeps a model of strategy='fsdp')"
        if isinstance(value, torch.distributed.ProcessGroup):
            return "a group of torch.distributed"
        return ""

    def loses(self, value: Any) -> str:
        """A tensor's graph, or the wrapper of DistributedDataParallel."""
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return "its graph"
        if isinstance(value, nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel around it: prepare it again"
        return ""

    def random_state(self) -> Any:
        """The random numbers of the CPU, and of GPUs that are in use."""
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpus = torch.cuda.get_rng_state_all() if in_use else []
        return torch.get_rng_state(), gpus

    def set_random_state(self, state: Any) -> None:
        """As `torch.set_rng_state`; ignores states of GPUs that this rank does not have."""
        cpu, gpus = state
        torch.set_rng_state(cpu)
        for number, one in enumerate(gpus[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, number)

    def seed(self, number: int) -> None:
        """As `torch.manual_seed`."""
        torch.manual_seed(number)

    def of_logical_ranks(self) -> tuple[Any, Any] | None:
        """Their random numbers, and buffers of models."""
        return for_snapshot()

    def restore_logical_ranks(self, objects: Any, own: Any, of_ranks: Sequence[Any], place: tuple[int, int]) -> None:
        from_snapshot(objects, own, of_ranks, place)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    numbers: Any = flat.cpu().numpy()
    return memoryview(numbers)


def _reduced_tensor(tensor: Tensor) -> Any:
    plain = (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
    if not plain:
        return NotImplemented
    view = (
        type(tensor),
        tensor.untyped_storage(),
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad and tensor.is_leaf,
    )
    own = tensor.__dict__
    return (_tensor, view, own, None, None, _set_attributes) if own else (_tensor, view)


def _tensor(
    kind: type, storage: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    if kind is nn.Parameter:
        return nn.Parameter(tensor, requires_grad)
    if kind is nn.Buffer:
        return nn.Buffer(tensor)
    found: Tensor = tensor.requires_grad_(requires_grad)
    return found


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)


def _itself(value: Any) -> Any:
    return value


def _reduced_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    notes = notes_of(optimizer)
    noted = {"steps": notes.steps, "outer": notes.outer, "knobs_of": notes.knobs_of}
    kept = optimizer.__getstate__(), noted, list(notes.models), list(notes.schedulers)
    return object.__new__, (type(optimizer),), kept, None, None, _set_optimizer


def _set_optimizer(optimizer: torch.optim.Optimizer, kept: Any) -> None:
    state, noted, models, schedulers = kept
    optimizer.__setstate__(state)
    vars(notes_of(optimizer)).update(noted)
    notes_of(optimizer).refer(models, schedulers)


def _reduced_wrapper(wrapper: Wrapper) -> Any:
    _, (mixin, original, names, _), (_, outer), *_ = wrapper.__reduce_ex__(4)
    models = [] if wrapper._superseded else models_beside(wrapper)
    return wrap, (mixin, original, names), ((wrapper._kept(), outer), models), None, None, _set_wrapper


def _set_wrapper(wrapper: Wrapper, state: tuple[tuple[dict[str, Any], Any], list[nn.Module]]) -> None:
    kept, models = state
    put_kept(wrapper, kept)
    average_rest(models, [wrapper])
