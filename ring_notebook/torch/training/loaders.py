"""Makes of a DataLoader, for `prepare`, one of the same class and attributes over this rank's share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import repeat
from types import new_class
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from ring_notebook.api.basics import rank as own_rank
from ring_notebook.api.objects import gather_objects, is_alone
from ring_notebook.api.process_sets import global_process_set
from ring_notebook.core.logical_ranks import progress
from ring_notebook.core.logical_ranks import share_rank as rank
from ring_notebook.core.logical_ranks import share_size as size
from ring_notebook.errors import RingError
from ring_notebook.torch.tensors import real_view
from ring_notebook.torch.training.agreed_numbers import AgreedNumbers, draw_seed, states
from ring_notebook.torch.training.rank_shares import (
    DistributedSampler,
    SeededSampler,
    ShardedIterable,
    ShardedSampler,
    StatefulIterable,
    length_of,
    loses_elements,
)
from ring_notebook.torch_private import private

T = TypeVar("T")

_loader_passes: Any = private("loader_passes") or ()
_SEEDED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ROWS, _COLUMNS = 64, 4096
"""Most rows of a part of the data to compare between ranks (and columns of a list or frame), most numbers of a row."""
_TORCHDATA = "torchdata.stateful_dataloader"
_REPEATED = "_RepeatSampler"
"""The sampler of loaders that keep their workers from pass to pass, such as those of timm and Ultralytics."""
_DIVISIONS = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("_world_size", "_rank"),
    ("num_processes", "process_index"),
    ("data_parallel_size", "data_parallel_rank"),
)
"""Attributes in which samplers and iterable data sets have the number of ranks that share samples, and their rank."""


def shard(loader: DataLoader[T], *, kind: str | None = None, number: int = 0) -> DataLoader[T]:
    """``loader`` over this rank's share, in batches of the same size; all ranks call this.

    The result has a subclass of the loader's class, and the loader's attributes. Its samplers, or its iterable data
    set, stand in for the user's, and pass on their attributes and methods. The batches of step k on p ranks are
    together the batch of step k of one process with a batch p times as large, or p consecutive batches of a batch
    sampler. Their order is as in one process, by the loader's generator or by the random numbers of rank 0 now;
    ``number`` distinguishes loaders that are prepared together.

    With ``kind``, such as "cuda", the batches are on this rank's device of that kind. Batches of workers go there from
    pinned memory; without workers the training thread would have to pin them, which gains nothing.

    A loader that already yields a share keeps it. Raises TypeError for anything but a DataLoader, and ValueError on all
    ranks if their loaders differ, or if a sampler divides the samples among other ranks.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare takes a torch DataLoader, got {type(loader).__name__}; shard other data by rank() and size()"
        )
    if isinstance(loader, PreparedLoader):
        return loader
    changes, share = ({}, None) if _is_share(loader) else _share(loader, number)
    if share is None and kind is None:
        return loader
    made: Any = blank(PreparedLoader, type(loader))
    vars(made).update(vars(loader), **changes, _iterator=None)
    made.pin_memory = loader.pin_memory or (kind is not None and loader.num_workers > 0)
    made._preparation = _Preparation(loader, kind, share)
    return made  # type: ignore[no-any-return]


class PreparedLoader(DataLoader[T]):
    """What `shard` returns; its class has this class and the user's as bases."""

    _preparation: _Preparation

    def __iter__(self) -> Any:
        about = self._preparation
        about.begin(self)
        with about.where_loaders_draw():
            batches = super().__iter__()
        return about.received(batches)

    def state_dict(self, *, is_in_pass: bool = True) -> dict[str, Any]:
        """The position in the pass in progress, and its order; rank 0's serves all ranks.

        Without ``is_in_pass``, only the order, for a new pass.
        """
        return self._preparation.state(self, is_in_pass, getattr(super(), "state_dict", None))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next pass continue the one in which `state_dict` was taken, on any number of ranks.

        The remaining samples are divided anew: none is used twice or left out, except at the end of a pass that cannot
        be divided evenly. The data set resumes by its own state, or is read again up to the position. Raises RingError
        for the state of another kind of loader, or of an iterable data set with another number of workers.
        """
        self._preparation.continue_at(self, state_dict, getattr(super(), "load_state_dict", None))

    def before_next_pass(self, call: Callable[[], object]) -> None:
        """Call ``call`` once, when the next pass has begun and is about to read its first batch."""
        self._preparation.before_pass = call

    @property
    def about_continuation(self) -> str:
        """A note for the user about how the next pass continues another one; may be empty."""
        return self._preparation.remark

    def __reduce_ex__(self, protocol: Any) -> Any:  # without the state of a pass in progress
        kept = {name: None if isinstance(one, _loader_passes) else one for name, one in vars(self).items()}
        return (
            blank,
            (PreparedLoader, type(self).__bases__[1]),
            kept | {"_preparation": copy(self._preparation)},
        )


@cache
def _class_of(ours: type, kind: type) -> type:
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return new_class(kind.__name__, (ours, kind), exec_body=lambda namespace: namespace.update(about))


def blank(ours: type, kind: type) -> Any:
    """An object of a class that is both one of ``ours`` and the user's ``kind``."""
    return object.__new__(_class_of(ours, kind))


class _Preparation:
    """The attributes of a prepared loader that the original loader lacks."""

    def __init__(self, loader: DataLoader[Any], kind: str | None, share: Any) -> None:
        self._kind = kind
        self._share = share
        self._generator = loader.generator
        self._kept_passes = _kept_passes(loader)
        self._place: tuple[int, int] | None = None  # the rank and the number of ranks in the last pass
        self._batches: int | None = None  # batches that the loop has got from the pass in progress
        self._begun_at = self._epoch = 0  # with a sampler: what all ranks had used before that pass, and its epoch
        self._at_begin: Any = None  # the random numbers at the begin of that pass
        self._loaded: dict[str, Any] | None = None  # the state that the next pass continues
        self.before_pass: Callable[[], object] | None = None
        self.remark = ""
        has_own_loop = type(loader).__iter__ is not DataLoader.__iter__
        is_read_here = loader.num_workers == 0 or not isinstance(share, ShardedIterable)
        self._is_doubtful = share is not None and has_own_loop and is_read_here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None, "_batches": None, "before_pass": None}

    @property
    def _numbers(self) -> AgreedNumbers | None:
        """The numbers that all ranks draw alike in a pass over an iterable data set; None on a single rank."""
        share = self._share
        return share._numbers if isinstance(share, ShardedIterable) and (size() > 1 or share._is_continued) else None

    def begin(self, loader: DataLoader[Any]) -> None:
        """Begin a pass, on the ranks of this generation."""
        if self._place != (rank(), size()):
            self._place = rank(), size()
            self._follow_ranks(loader)
        if self._numbers is not None:
            self._numbers.begin()
        self._note_begin(loader)

    def _note_begin(self, loader: Any) -> None:
        self._batches, share = 0, self._share
        if isinstance(share, ShardedIterable):
            share.begin(loader.num_workers, vars(loader).get("_iterator") is None)
            numbers = self._numbers
            self._at_begin = _numbers_of(loader) if numbers is None else numbers.at_begin()
        elif isinstance(share, ShardedSampler):
            self._begun_at = share.used
        elif isinstance(share, DistributedSampler):
            self._begun_at, self._epoch = share.used, share.epoch

    def state(self, loader: Any, is_in_pass: bool, of_class: Callable[[], Any] | None) -> dict[str, Any]:
        """See `PreparedLoader.state_dict`; ``of_class`` is the method of the user's class."""
        if self._loaded is not None and is_in_pass:
            return self._loaded
        share, batches = self._share, self._batches
        if _is_in_any_order(loader) and batches and is_in_pass:
            return self.state(loader, False, None) | {"in_order": False}
        if not is_in_pass:
            batches = None
        used = self._begun_at + (batches or 0) * _elements_of_batch(loader, share) * (self._place or (0, 1))[1]
        if isinstance(share, ShardedIterable):
            state: dict[str, Any] = {"workers": loader.num_workers}
            if not batches:
                return state
            if of_class is not None and loader.num_workers and _tells_where_it_is(loader, share):
                return state | {"class": of_class()}
            return state | {"place": share.place(batches, loader.batch_size or 1), "numbers": self._at_begin}
        if isinstance(share, ShardedSampler):
            return {"used": used, "numbers": share.at_begin()} if batches else {"used": 0}
        sampler = resumable_sampler(loader)
        if sampler is None or share is None:
            return {} if sampler is None else state_of_sampler(sampler)
        if batches is None:
            return {**sampler.order(), "epoch": sampler.epoch, "used": 0}
        return {**sampler.order(), "epoch": self._epoch, "used": used}

    def continue_at(self, loader: Any, state: dict[str, Any], of_class: Callable[[Any], object] | None) -> None:
        """See `PreparedLoader.load_state_dict`."""
        share, self._batches, self._loaded, self.remark = self._share, None, state, ""
        if self._kept_passes or isinstance(share, ShardedIterable):
            self._place = None  # restart passes and workers, which are at another position
            vars(loader)["_iterator"] = None
        if isinstance(share, ShardedIterable):
            self._continue_stream(loader, share, state, of_class)
        elif isinstance(share, ShardedSampler):
            share.continue_at(_known(state, "used"), state.get("numbers"))
            if state["used"]:
                self.remark = f"{type(share._given).__name__} draws {state['used']:,} elements again"
        elif sampler := resumable_sampler(loader):
            sampler.load_state_dict(state | {"used": _known(state, "used")})
            self.remark = sampler.remark()
        if not state.get("in_order", True):
            self.remark = f"{type(loader).__name__} begins its pass again: in_order=False does not tell what was used"

    def _continue_stream(self, loader: Any, share: ShardedIterable, state: Any, of_class: Any) -> None:
        if (workers := _known(state, "workers")) != loader.num_workers and len(state) > 1:
            raise RingError(
                f"rank {rank()}: a pass over an iterable data set with num_workers={workers} cannot continue with "
                f"num_workers={loader.num_workers}, which divide the data otherwise; continue with {workers}"
            )
        share.continue_at(state.get("place"))
        if "numbers" in state:
            share._numbers.continue_with(state["numbers"])
        if "class" in state:
            if of_class is None:
                raise RingError(f"rank {rank()}: the pass was one of StatefulDataLoader; continue it with that class")
            of_class(state["class"])
        elif "place" in state and state["place"]["state"] is None:
            name = type(share._given).__name__
            self.remark = f"{name} is read again to skip {sum(state['place']['used']):,} elements"

    def where_loaders_draw(self) -> AbstractContextManager[object]:
        """A context in which loaders draw on the CPU, where our generators are, whatever the default device is."""
        draws = self._generator is None and self._numbers is not None and self._numbers.is_drawn_by_loader
        return torch.device("cpu") if draws else nullcontext()

    def _follow_ranks(self, loader: DataLoader[Any]) -> None:
        own = vars(loader)
        if isinstance(self._share, ShardedIterable):
            self._share._follow_ranks()
            own["generator"] = self._generator
            if self._numbers is not None and self._numbers.is_drawn_by_loader:
                own["generator"] = self._numbers.generator
            own["_iterator"] = None  # its workers read another rank's share
        for name in self._kept_passes:
            own[name] = DataLoader.__iter__(loader)

    def received(self, batches: Any) -> Any:
        """``batches`` of a pass, from this rank's share and on its device."""
        if self._numbers is not None:
            batches = _counted(batches, self._numbers)
        batches = self._noted(batches)
        if self._is_doubtful and size() > 1:
            batches = self._checked(batches)
        if self._kind is None:
            return batches
        device = torch.device(self._kind, getattr(torch, self._kind).current_device())
        return map(partial(to_device, device=device), batches)

    def _noted(self, batches: Iterator[T]) -> Iterator[T]:
        call, self.before_pass = self.before_pass, None
        if call is not None:
            call()
        for batch in batches:
            self._forget_loaded()
            self._batches = (self._batches or 0) + 1
            yield batch
        self._forget_loaded()
        self._batches = None

    def _forget_loaded(self) -> None:
        self._loaded = None
        if isinstance(self._share, ShardedIterable):
            self._share._continued = None  # workers still have it, in copies from their start

    def _checked(self, batches: Iterator[T]) -> Iterator[T]:
        for batch in batches:
            if self._is_doubtful and not self._share._is_used:
                raise TypeError(
                    f"rank {rank()}: prepare cannot split this loader: its own __iter__ yields a batch that does not "
                    "come from its sampler, batch sampler or data set; yield what `super().__iter__()` yields, or "
                    "shard the data by rank() and size() and leave the loader out of prepare"
                )
            self._is_doubtful = False
            yield batch


def _kept_passes(loader: DataLoader[Any]) -> list[str]:
    """The attributes in which a loader of a user's class keeps an iterator over itself."""
    return [name for name, one in vars(loader).items() if name != "_iterator" and isinstance(one, _loader_passes)]


def _counted(batches: Iterator[T], numbers: AgreedNumbers) -> Iterator[T]:
    """``batches``; notes the numbers drawn for them, and whether all ranks take part in the pass."""
    spent = progress()
    while True:
        numbers.counts = numbers.counts or progress() != spent
        try:
            batch = next(batches)
        except StopIteration:
            numbers.counts = True
            return
        finally:
            numbers.has_drawn()
        yield batch


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors, and other objects that have a method ``to``, on ``device``.

    A copy from pinned memory does not make the host wait. Lists, tuples, mappings and dataclasses stay what they are.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy(batch)
        moved.update((name, to_device(one, device)) for name, one in batch.items())
        return moved
    if is_dataclass(batch) and not isinstance(batch, type):
        made: Any = copy(batch)
        for field in fields(batch):
            object.__setattr__(made, field.name, to_device(getattr(batch, field.name), device))  # it may be frozen
        return made
    if isinstance(batch, list | tuple):
        parts = [to_device(one, device) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _elements_of_batch(loader: Any, share: Any) -> int:
    """Elements that the sampler ``share`` draws for a batch; 1 for a batch sampler."""
    one = loader.batch_sampler
    while type(one).__name__ == _REPEATED:
        one = one.sampler
    return 1 if one is share else batch_size_of(loader) or 1


def _is_in_any_order(loader: Any) -> bool:
    """Whether batches come in the order in which workers finish, so that their number does not tell which were used."""
    return loader.num_workers > 1 and not getattr(loader, "in_order", True)


def _tells_where_it_is(loader: Any, share: ShardedIterable) -> bool:
    """Whether torchdata's StatefulDataLoader saves the data set's state in its workers at every batch."""
    asks: bool = getattr(loader, "snapshot_every_n_steps", None) == 1
    return asks and isinstance(share, StatefulIterable) and not loses_elements(share._given)


def _numbers_of(loader: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """As `AgreedNumbers.at_begin`, for a loader that draws from the numbers of the process."""
    process = states()
    generator = process["torch"] if loader.generator is None else loader.generator.get_state()
    return generator, process.pop("torch"), process


def _known(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise RingError(f"rank {rank()}: the state was saved by another kind of loader; continue with the same kind")
    return state[name]


def state_of_sampler(sampler: DistributedSampler) -> dict[str, Any]:
    """The position of a loader that `shard` did not divide, but whose sampler can continue a pass."""
    kept = sampler.kept()
    return {**sampler.order(), "epoch": kept["epoch"], "used": kept["used"]}


def resumable_sampler(loader: Any) -> DistributedSampler | None:
    """The sampler of a loader that can continue a pass: `DistributedSampler` or a subclass by `shard`; else None."""
    inner = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((one for one in inner if isinstance(one, DistributedSampler)), None)


def batch_size_of(loader: Any) -> int | None:
    """The number of samples in a batch of ``loader``; None if neither it nor its batch sampler has one."""
    found = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None


def _is_share(loader: DataLoader[Any]) -> bool:
    """Whether a loader divides its samples among the ranks already."""
    divided = [*nested(loader.batch_sampler), *nested(loader.sampler)]
    if isinstance(loader.dataset, IterableDataset):
        divided = [loader.dataset, getattr(loader.dataset, "_distributed", None)]  # of Hugging Face's datasets
    for one in divided:
        if isinstance(one, DistributedSampler):
            return True
        for ranks_name, own_name in _DIVISIONS:
            ranks, own = getattr(one, ranks_name, None), getattr(one, own_name, None)
            if not isinstance(ranks, int) or not isinstance(own, int) or ranks == 1:
                continue
            if (ranks, own) != (size(), rank()) and size() > 1:
                raise ValueError(
                    f"rank {rank()} of {size()}: prepare cannot split a loader whose {type(one).__name__} has the "
                    f"share of rank {own} of {ranks}; leave that division out, or make it with rank() and size()"
                )
            return True
    return False


def nested(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it draws from."""
    for _ in range(5):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)  # not `or`: a sampler's truth is its length, which it may lack
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def _share(loader: DataLoader[Any], number: int) -> tuple[dict[str, Any], Any]:
    """The new attributes of a loader for this rank's share of the samples, and the object that divides these."""
    if isinstance(loader.dataset, IterableDataset):
        state = _agreed(loader, loader.dataset, loader.generator, number)
        kind = StatefulIterable if hasattr(loader.dataset, "state_dict") else ShardedIterable
        dataset = kind(
            loader.dataset, loader.drop_last, AgreedNumbers(loader.generator, *state, loader.num_workers > 0)
        )
        return {"dataset": dataset, "worker_init_fn": _InWorker(loader.worker_init_fn)}, dataset
    if loader.batch_sampler is None:
        sampler, share = _shared(loader.sampler, False, loader, number)
        return {"sampler": sampler}, share
    batch_sampler, share = _shared(loader.batch_sampler, loader.drop_last, loader, number)
    changes = {"batch_sampler": batch_sampler}
    if getattr(loader.batch_sampler, "sampler", None) is loader.sampler:
        changes["sampler"] = share
    return changes, share


def _shared(sampler: Any, drop_last: bool, loader: DataLoader[Any], number: int) -> tuple[Any, Any]:
    """The replacement of ``sampler``, and its part that divides the samples.

    A plain batch sampler makes batches of a share of the samples. For other batch samplers, the batches are divided,
    because it is not known how they choose samples.
    """
    is_batches = type(sampler) is BatchSampler or _is_of_torchdata(sampler, "BatchSampler")
    if is_batches or type(sampler).__name__ == _REPEATED:
        own = copy(sampler)
        inner = sampler.drop_last if is_batches else drop_last
        own.sampler, share = _shared(sampler.sampler, inner, loader, number)
        return own, share
    drop_last = drop_last or getattr(sampler, "drop_last", False) is True
    if type(sampler) in _SEEDED or _is_of_torchdata(sampler, "RandomSampler"):
        generator = getattr(sampler, "generator", None)
        state, _ = _agreed(loader, sampler, generator, number)
        made: Any = SeededSampler(sampler, drop_last, state, _draws(loader, sampler))
    else:
        _agreed(loader, sampler, None, number)
        made = ShardedSampler(sampler, drop_last)
    return made, made


def _is_of_torchdata(sampler: Any, name: str) -> bool:
    return type(sampler).__name__ == name and type(sampler).__module__.startswith(_TORCHDATA)


def _draws(loader: DataLoader[Any], sampler: Any) -> tuple[str, str]:
    """What a loader's first pass and its later ones draw from the numbers of its sampler, see `SeededSampler`."""
    if _kept_passes(loader):
        return "o", "o"
    seed = "w" if loader.generator is getattr(sampler, "generator", None) else ""
    first = f"{seed}o"
    if _is_of_torchdata(loader.batch_sampler, "BatchSampler") and _is_of_torchdata(sampler, "RandomSampler"):
        first = f"o{seed}o" if loader.num_workers else f"o{seed}"
    return first, "o" if loader.persistent_workers else first


def _agreed(
    loader: DataLoader[Any], source: Any, generator: torch.Generator | None, number: int
) -> tuple[Tensor, dict[str, Any]]:
    """The state of ``generator`` and of the process's random numbers on rank 0.

    Raises ValueError on all ranks if ``source``, which chooses the samples, differs between them.
    """
    what = f"{type(source).__name__} with {length_of(source)} samples"
    described = f"{type(loader).__name__} over {what}, batch {loader.batch_size}"
    process = states()
    state = process["torch"] if generator is None else generator.get_state()
    own = (state, process) if own_rank() == 0 or is_alone() else None
    marks = _marks(loader.dataset, source)
    rows = gather_objects((described, marks, own), "loaders", global_process_set)
    for other, (theirs, _, _) in enumerate(rows):
        if theirs != rows[0][0]:
            raise ValueError(
                f"rank {own_rank()}: the ranks gave prepare different loaders: rank 0 a {rows[0][0]}, rank {other} a "
                f"{theirs}; give every rank the whole data"
            )
    for other, (_, theirs, _) in enumerate(rows):
        if not _are_alike(theirs, rows[0][1]):
            raise ValueError(
                f"rank {own_rank()}: the ranks gave prepare different samples: those of rank {other} are not those of "
                "rank 0. Data or a split by each rank's own random numbers does that; seed them alike: "
                "np.random.seed(0), torch.manual_seed(0), train_test_split(..., random_state=0), random_split(..., "
                "generator=torch.Generator().manual_seed(0)). A loader over data that the ranks have divided "
                "themselves is not for prepare"
            )
    state, process = rows[0][2]
    return state if generator is not None else _stream(state, number), process


def _marks(dataset: Any, sampler: Any) -> list[Any]:
    """Marks that distinguish different splits of samples: of indices, and of a few numbers of other data."""
    marks: list[Any] = []
    inside = [sampler, dataset]
    while inside:
        one = inside.pop()
        if isinstance(one, ConcatDataset):
            inside += one.datasets
        elif isinstance(one, Subset | SubsetRandomSampler):
            marks.append(crc32(repr((len(one.indices), [str(index) for index in _some(one.indices)])).encode()))
            inside += [one.dataset] if isinstance(one, Subset) else []
        elif isinstance(one, Dataset):
            parts = one.tensors if isinstance(one, TensorDataset) else getattr(one, "__dict__", {}).values()
            known = map(_numbers_in, parts, repeat(length_of(one)))
            marks.append([columns for columns in known if columns is not None])
    return marks


def _numbers_in(part: Any, count: int | None) -> list[Tensor] | None:
    """Columns of numbers for some of ``count`` rows of a tensor, array, list or frame of pandas; None for others."""
    if isinstance(part, list | tuple):
        return _columns(_some(part)) if count and len(part) == count else []
    is_array, is_tensor = isinstance(part, np.ndarray), isinstance(part, Tensor)
    is_frame = hasattr(type(part), "iloc")
    is_of_numbers = part.dtype.kind in "biufc" if is_array else is_tensor and not part.is_quantized
    is_strided = is_array or is_frame or (is_of_numbers and part.layout == torch.strided)
    if not is_strided or not part.ndim or not count or len(part) != count:
        return None
    step = count // _ROWS + 1
    if is_frame:
        rows = part.iloc[::step]
        columns = [rows.iloc[:, at] for at in _some(range(rows.shape[1]))] if part.ndim == 2 else [rows]
        # The index tells which rows of the whole these are, unless it is new.
        index = [] if type(rows.index).__name__ == "RangeIndex" else [rows.index]
        return [_numbers(column.tolist()) for column in index + columns]
    rows = part[::step]
    if part.ndim == 1 and not (is_of_numbers and _is_inexact(part)):
        return _columns(rows.tolist())
    if not is_of_numbers:
        return None
    width = math.prod(rows.shape[1:])
    rows = rows.reshape(len(rows), width)[:, :: width // _COLUMNS + 1]  # before the copy: rows may be large, on disk
    return [real_view(torch.tensor(rows) if is_array else rows.detach().cpu()).double().flatten(1).sum(1)]


def _is_inexact(part: Any) -> bool:
    return part.dtype.kind in "fc" if isinstance(part, np.ndarray) else part.is_floating_point() or part.is_complex()


def _columns(rows: list[Any]) -> list[Tensor]:
    """The columns of rows that are tuples, lists or dicts; of others one."""
    first = rows[0] if rows else None
    if isinstance(first, list | tuple) and all(isinstance(row, list | tuple) for row in rows):
        return [_numbers(list(column)) for column in zip(*(row[:_ROWS] for row in rows), strict=False)]
    if isinstance(first, dict) and all(isinstance(row, dict) for row in rows):
        return [_numbers([row.get(key) for row in rows]) for key in [*first][:_ROWS]]
    return [_numbers(rows)]


def _numbers(values: list[Any]) -> Tensor:
    """A number for each value that has one: equal for equal names and integers only, close for numbers that are."""

    def number(value: Any) -> float | None:
        if isinstance(value, str | os.PathLike):
            return crc32(os.path.basename(os.fspath(value)).encode())
        if isinstance(value, int | np.integer):
            return crc32(str(int(value)).encode())
        if isinstance(value, float | np.floating):
            return float(value)
        if isinstance(value, np.ndarray | Tensor) and (found := _numbers_in(value[None], 1)):
            return float(found[0][0])
        return None

    return torch.tensor([one for value in values if (one := number(value)) is not None], dtype=torch.double)


def _some(part: Sequence[Any]) -> list[Any]:
    return [part[at] for at in range(0, len(part), len(part) // _ROWS + 1)]


def _are_alike(marks: list[Any], others: list[Any]) -> bool:
    """Whether samples are the same. Parts with few values, such as labels, do not count; one equal part suffices."""

    def alike(own: Any, other: Any) -> bool:
        if isinstance(own, int) or isinstance(other, int) or len(own) != len(other):
            return bool(own == other)
        columns = [pair for parts in zip(own, other, strict=True) for pair in zip(*parts, strict=False)]
        telling = [pair for pair in columns if len(pair[0].unique()) > len(pair[0]) / 2]
        return not telling or any(len(one) == len(two) and is_close(one, two) for one, two in telling)

    def is_close(one: Tensor, two: Tensor) -> bool:  # ranks may have computed the data with different rounding
        return torch.isclose(one, two, rtol=1e-3, atol=1e-6, equal_nan=True).double().mean().item() > 0.5

    return len(marks) == len(others) and all(map(alike, marks, others))


def _stream(state: Tensor, number: int) -> Tensor:
    """``state`` for ``number`` 0; for others, the state of a generator with independent numbers."""
    if number == 0:
        return state
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(number):
        seed = draw_seed(generator)
    return generator.manual_seed(seed).get_state()


class _InWorker:
    """Starts a worker: in it, the data set of `get_worker_info` is the user's."""

    def __init__(self, given: Callable[[int], object] | None) -> None:
        self.given = given

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, ShardedIterable):
            object.__setattr__(info, "dataset", info.dataset._given)
        if self.given is not None:
            self.given(worker_id)
