"""Each rank's share of a data set: samplers and iterables that give every rank the same number of samples."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from ring_notebook.api.basics import is_initialized, rank, size
from ring_notebook.api.objects import broadcast_object
from ring_notebook.core.step_points import between_steps, in_pass
from ring_notebook.core.world import communication
from ring_notebook.torch_private import pass_of_workers, private

T = TypeVar("T")

_workers_passes = private("workers_passes")
_DRAWN = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def share_of(order: Sequence[T]) -> Iterator[T]:
    """Every p-th element for this rank of p, extended with the first elements so that all ranks get the same number."""
    made_up = -(-len(order) // size()) * size()
    return islice(cycle(order), rank(), made_up, size())


class DistributedSampler(TorchDistributedSampler[Any]):
    """torch's DistributedSampler for this rank, which reshuffles in every pass without ``set_epoch``.

    Rank r of p gets elements r, r + p, ... of the order of an epoch, so that the ranks' i-th batches together are the
    i-th batch of p times the size. The order is extended to a multiple of p with its first elements, or cut with
    ``drop_last``. ``seed`` is equal on all ranks. `set_epoch` still sets the epoch of the next pass. A pass divides the
    data among the ranks at its begin: a loader of an earlier cell can serve a cell on fewer ranks.

    A pass counts when it ends, or continues after a collective. So a single rank may look at a batch without changing
    its order; it must not iterate over all batches alone.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(dataset, size(), rank(), shuffle, seed, drop_last)
        self._drawn: int | None = None  # by this rank in the pass in progress, and those before its begin
        self._pass = self._begun_at = 0  # the epoch of that pass, and what was used before its begin
        self._random: Any = None  # where a pass continues in another process: torch's random numbers at that moment
        self.used = 0
        """Samples at the beginning of the next pass that all ranks together have used before, and do not use again."""

    def __iter__(self) -> Iterator[Any]:
        self._follow_ranks()
        used, self.used = self.used // self.num_replicas, 0
        if self._random is not None:  # the loader has drawn a number for its workers, as it did when this pass began
            torch.set_rng_state(self._random)
            self._random = None
        epoch, spent = self.epoch, communication()
        drawn = used
        with in_pass():
            try:
                for index in islice(super().__iter__(), used, None):
                    # Every rank knows this without a message: only a pass in which all ranks take part has collectives.
                    if self.epoch == epoch and (self.num_replicas == 1 or communication() != spent):
                        self.epoch += 1
                    self._drawn, self._begun_at, self._pass = drawn, used, epoch  # another pass may be in progress
                    between_steps()
                    drawn += 1
                    self._drawn = drawn
                    yield index
            finally:
                self._drawn = None
        if self.epoch == epoch:  # not counted yet, and not set by set_epoch
            self.epoch += 1

    def __len__(self) -> int:
        self._follow_ranks()
        return max(0, super().__len__() - self.used // self.num_replicas)

    def kept(self) -> dict[str, Any]:
        """Its attributes for another process, where the next pass continues the one in progress."""
        kept = {**self.__dict__, "_drawn": None}
        own = self._drawn
        if workers := _workers_pass(self):
            batches, batch_size = workers
            own = self._begun_at + batches * batch_size
        if own is not None:
            kept["used"] = own * self.num_replicas
            kept["epoch"], kept["_random"] = self._pass, torch.get_rng_state()
        return kept

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass is in progress."""
        return self._drawn is not None

    def _follow_ranks(self) -> None:
        if is_initialized() and (size(), rank()) != (self.num_replicas, self.rank):
            epoch = self.epoch
            super().__init__(self.dataset, size(), rank(), self.shuffle, self.seed, self.drop_last)
            self.epoch = epoch


def _workers_pass(sampler: DistributedSampler) -> tuple[int, int] | None:
    """Of a loader with workers: the batches that its loop has got in the pass in progress, and the size of one.

    The workers have drawn more. None without workers, and outside of a pass.
    """
    for one in gc.get_objects() if _workers_passes is not None else ():
        if issubclass(type(one), _workers_passes):
            batches, sent, came = pass_of_workers(one)
            if getattr(batches, "sampler", batches) is sampler and (sampler.is_in_pass or came < sent):
                return came, getattr(batches, "batch_size", 1)
    return None


class ShardedSampler(Sampler[Any]):
    """This rank's share of the draw of any sampler (or batch sampler) on rank 0.

    Random samplers draw differently on every rank, so rank 0 sends its draw to all ranks in each pass: all ranks must
    iterate. The draw is extended to a multiple of the number of ranks with its first elements.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return share_of(broadcast_object(list(self.sampler) if rank() == 0 else None, name="sampler"))

    def __len__(self) -> int:
        return -(-len(self.sampler) // size())  # type: ignore[arg-type]


class ShardedIterable(IterableDataset[Any]):
    """Every p-th element of an iterable data set, which yields the same on all p ranks.

    The last elements are dropped if they are fewer than p, so that all ranks make the same number of steps.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self._follow_ranks()

    def __iter__(self) -> Iterator[Any]:
        self._follow_ranks()
        elements = iter(self.dataset)
        while len(turn := list(islice(elements, self.size))) == self.size:
            yield turn[self.rank]

    def __len__(self) -> int:
        self._follow_ranks()
        return len(self.dataset) // self.size  # type: ignore[arg-type]

    def _follow_ranks(self) -> None:
        if is_initialized():  # not in a spawned worker of a DataLoader, which has its rank's values
            self.rank, self.size = rank(), size()


class DeviceLoader(DataLoader[T]):
    """A DataLoader whose batches are moved to this rank's device of a kind, such as "cuda"."""

    kind = ""

    def __iter__(self) -> Any:
        device = torch.device(self.kind, getattr(torch, self.kind).current_device())
        return map(partial(to_device, device=device), super().__iter__())


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors, and other objects that have a method ``to``, on ``device``.

    A copy from pinned memory does not make the host wait. Lists, tuples and dicts stay what they are.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, dict):
        moved = copy(batch)
        moved.update((name, to_device(one, device)) for name, one in batch.items())
        return moved
    if isinstance(batch, list | tuple):
        parts = [to_device(one, device) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def shard(loader: DataLoader[T], *, kind: str | None = None) -> DataLoader[T]:
    """A DataLoader like ``loader`` that yields this rank's share, in batches of the same size.

    With ``kind``, such as "cuda", the batches are on this rank's device of that kind. What workers make goes there from
    pinned memory. Without workers the thread that trains would have to pin it, which gains nothing.

    A loader that shuffles still shuffles, with a seed that rank 0 takes from torch's. A loader that already yields a
    share, from this function or torch's own DistributedSampler, keeps it. Raises TypeError for anything but a
    DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare takes a torch DataLoader, got {type(loader).__name__}; shard other data by rank() and size()"
        )
    if _is_share(loader) and (kind is None or isinstance(loader, DeviceLoader)):
        return loader
    # All options that this version of torch has, except those that choose the samples, which are set below.
    same = {name: getattr(loader, name) for name in inspect.signature(DataLoader).parameters if name not in _DRAWN}
    same["pin_memory"] = loader.pin_memory or (kind is not None and loader.num_workers > 0)
    same |= _drawn(loader) if _is_share(loader) else _share(loader)
    if kind is None:
        return DataLoader(**same)
    on_device: DeviceLoader[T] = DeviceLoader(**same)
    on_device.kind = kind
    return on_device


def _share(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a DataLoader that choose this rank's share of its samples."""
    drawn = _drawn(loader)
    if isinstance(loader.dataset, IterableDataset):
        return drawn | {"dataset": ShardedIterable(loader.dataset)}
    if "batch_sampler" in drawn:
        return drawn | {"batch_sampler": ShardedSampler(drawn["batch_sampler"])}
    sampler: Sampler[Any] = ShardedSampler(loader.sampler)
    if _is_plain(loader.sampler):
        seed = broadcast_object(torch.initial_seed() % (1 << 32), name="seed")
        sampler = DistributedSampler(loader.dataset, isinstance(loader.sampler, RandomSampler), seed)
    return drawn | {"sampler": sampler}


def _drawn(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a DataLoader that choose its samples."""
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        return {"dataset": loader.dataset, "batch_sampler": loader.batch_sampler}
    sizes = {"dataset": loader.dataset, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return sizes if isinstance(loader.dataset, IterableDataset) else sizes | {"sampler": loader.sampler}


def batch_size_of(loader: Any) -> int | None:
    """The number of samples in a batch of ``loader``; None where neither it nor its batch sampler has one."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None and isinstance(getattr(loader, "batch_sampler", None), ShardedSampler):
        size = getattr(loader.batch_sampler.sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _is_share(loader: DataLoader[Any]) -> bool:
    samplers = (loader.sampler, loader.batch_sampler)
    return isinstance(loader.dataset, ShardedIterable) or any(
        isinstance(sampler, (TorchDistributedSampler, ShardedSampler)) for sampler in samplers
    )


def _is_plain(sampler: Any) -> bool:
    """Whether it draws each sample once, in order or shuffled, like DistributedSampler."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
