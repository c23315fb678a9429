"""Each rank's share of a data set: samplers and iterables that give every rank the same number of samples."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from ring_notebook.api.basics import is_initialized
from ring_notebook.api.objects import broadcast_object
from ring_notebook.core.logical_ranks import progress
from ring_notebook.core.logical_ranks import share_rank as rank
from ring_notebook.core.logical_ranks import share_size as size
from ring_notebook.core.step_points import between_steps, in_pass
from ring_notebook.torch.training.agreed_numbers import AgreedNumbers, advanced, draw_seed, states
from ring_notebook.torch_private import pass_of_workers, private

T = TypeVar("T")

_loader_passes = private("loader_passes")
_MOST_DRAWN = 1 << 16
"""Most elements that rank 0 sends at once, if the length of a sampler is not known."""
_DEEPEST = 50
"""Nested steps of a Hugging Face data set that are searched."""


def share_of(order: Sequence[T]) -> Iterator[T]:
    """Every p-th element for this rank of p, extended with the first elements so that all ranks get the same number."""
    made_up = -(-len(order) // size()) * size()
    return islice(cycle(order), rank(), made_up, size())


def of_each(left: int, ranks: int, drop_last: bool) -> int:
    """How many of ``left`` elements each rank gets, equally many: some are used twice, or left out by ``drop_last``."""
    return max(0, left // ranks if drop_last else -(-left // ranks))


def length_of(source: Any) -> int | None:
    """The length of a sampler or data set; None if ``len`` raises anything (PyG: ValueError)."""
    try:
        return len(source)
    except Exception:
        return None


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
        self._drawn: int | None = None  # elements that this rank has drawn in the pass in progress
        self._pass = self._begun_at = 0  # the epoch of that pass, and what all ranks had used before its begin
        self._random: Any = None  # torch's random numbers, if the next pass continues one of another process
        self._length = len(dataset)  # type: ignore[arg-type]
        self._is_used = False
        self.used = 0
        """Samples at the beginning of the next pass that all ranks together have already used."""

    def __iter__(self) -> Iterator[Any]:
        self._follow_ranks()
        used, self.used = self.used, 0
        if self._random is not None:  # undo the loader's draw for its workers, which this pass had made already
            torch.set_rng_state(self._random)
            self._random = None
        epoch, spent = self.epoch, progress()
        drawn, self._is_used = 0, True
        with in_pass():
            try:
                for index in self._share(used):
                    # Every rank knows this without a message: only a pass in which all ranks take part has collectives.
                    if self.epoch == epoch and (self.num_replicas == 1 or progress() != spent):
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
        return of_each(self._length - self.used, self.num_replicas, self.drop_last)

    def kept(self) -> dict[str, Any]:
        """Attributes for another process, whose next pass continues the one in progress."""
        kept = {**self.__dict__, "_drawn": None}
        own = self._drawn
        if workers := _workers_pass(self):
            batches, batch_size = workers
            own = batches * batch_size
        if own is not None:
            kept["used"] = self._begun_at + own * self.num_replicas
            kept["epoch"], kept["_random"] = self._pass, torch.get_rng_state()
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The position in the pass in progress, for torchdata's StatefulDataLoader."""
        if self._drawn is None:
            return {**self.order(), "epoch": self.epoch, "used": 0}
        return {**self.order(), "epoch": self._pass, "used": self._begun_at + self._drawn * self.num_replicas}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next pass continue the one in which `state_dict` was taken, on any number of ranks."""
        self.set_order(state_dict)
        self.epoch, self.used = state_dict["epoch"], state_dict["used"]

    def remark(self) -> str:
        """A note for the user if the rest of a continued pass is not a multiple of the number of ranks."""
        self._follow_ranks()
        left = self._length - self.used
        uneven = left % self.num_replicas if self.used and left > 0 else 0
        if not uneven:
            return ""
        if self.drop_last:
            return f"{uneven} of the {left:,} samples that are left do not fill a step, and are left out"
        twice = self.num_replicas - uneven
        return f"{left:,} samples are left; {twice} are used twice, so that all {self.num_replicas} ranks get as many"

    def order(self) -> dict[str, Any]:
        """The state that decides the order of every epoch, for `set_order` in another process."""
        return {"seed": self.seed}

    def set_order(self, order: dict[str, Any]) -> None:
        """Take the orders of another process."""
        self.seed = order["seed"]

    @property
    def is_in_pass(self) -> bool:
        return self._drawn is not None

    def _share(self, used: int) -> Iterator[Any]:
        """This rank's elements of the next pass, after the first ``used`` of its order.

        They are divided anew: another number of ranks may have used the first ones.
        """
        order = self._order()
        made_up = chain(islice(order, used, None), cycle(order))
        ranks = self.num_replicas
        return islice(made_up, self.rank, of_each(len(order) - used, ranks, self.drop_last) * ranks, ranks)

    def _order(self) -> Sequence[Any]:
        """The elements of all ranks in the next pass."""
        whole: TorchDistributedSampler[Any] = TorchDistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        return list(whole)

    def _follow_ranks(self) -> None:
        place = (size(), rank()) if is_initialized() else (self.num_replicas, self.rank)
        length = len(self.dataset)  # type: ignore[arg-type]
        if (*place, length) != (self.num_replicas, self.rank, self._length):
            epoch = self.epoch
            super().__init__(self.dataset, *place, self.shuffle, self.seed, self.drop_last)
            self.epoch, self._length = epoch, length


def _workers_pass(sampler: DistributedSampler) -> tuple[int, int] | None:
    """The batches that a loop has got from a loader with workers, which draw ahead, and the batch size.

    None without workers, and outside of a pass.
    """
    for one in gc.get_objects() if _loader_passes is not None else ():
        if issubclass(type(one), _loader_passes):
            batches, sent, came = pass_of_workers(one)
            if getattr(batches, "sampler", batches) is sampler and (sampler.is_in_pass or came < sent):
                return came, getattr(batches, "batch_size", 1)
    return None


class _StandIn:
    """Replaces a user's object, and has its attributes and methods beside a few of its own.

    Its own attributes are set in ``__init__``, `_given` last.
    """

    _given: Any
    _hidden: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._hidden or "_given" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_given" not in self.__dict__ or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._given, name, value)


class SeededSampler(_StandIn, DistributedSampler):
    """This rank's share of the draw of one of torch's samplers, in the order of a single process.

    All ranks draw alike without a message: from the sampler's generator, which begins with rank 0's state, or from a
    copy of rank 0's random numbers. Each pass continues these where the last one ended. If a program has seeded the
    generator, or drawn from it, the next pass takes rank 0's state of it; all ranks must then begin that pass.

    ``draws`` has two texts, for the first pass and for later ones, with a letter for each draw: "o" an order, "w" a
    seed of the loader's workers. The last order is used.
    """

    def __init__(self, given: Any, drop_last: bool, state: Tensor, draws: tuple[str, str]) -> None:
        super().__init__(given, shuffle=False, drop_last=drop_last)
        self._draws = draws
        self._first: tuple[int, Tensor, str] = (0, state, draws[0])  # an epoch, the numbers at its begin, its draws
        self._known = self._first  # the same for the latest epoch
        self._pinned: float = 0  # before this epoch a single rank ignores its present random numbers
        self._left = state
        if (generator := getattr(given, "generator", None)) is not None:
            generator.set_state(state)
        self._given = given

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``, even if something else has drawn random numbers since."""
        self._pinned = math.inf
        self.epoch = epoch

    def order(self) -> dict[str, Any]:
        return {"first": self._first}

    def set_order(self, order: dict[str, Any]) -> None:
        self._first = self._known = order["first"]
        self._pinned = math.inf

    def kept(self) -> dict[str, Any]:
        kept = super().kept()
        is_in_pass = kept["_random"] is not None
        return kept | {"_pinned": max(self._pinned, kept["epoch"] + is_in_pass)}

    def _order(self) -> Sequence[Any]:
        with torch.device("cpu"):  # torch's samplers draw on the CPU, whatever the default device is
            return self._drawn_order()

    def _drawn_order(self) -> list[Any]:
        generator: torch.Generator | None = getattr(self._given, "generator", None)
        numbers = torch.default_generator if generator is None else generator
        now = left = numbers.get_state()
        if generator is None:
            if self.num_replicas == 1 and self.epoch >= self._pinned:
                self._begin_with(now)
        elif not any(torch.equal(now, one) for one in (self._left, advanced(self._left))):
            self._begin_with(broadcast_object(now, name="state of the generator of a loader"))
        try:
            self._known = self._reached(numbers)
            _, state, draws = self._known
            before, _, after = draws.rpartition("o")
            state, _ = self._run(numbers, state, before)
            end, order = self._run(numbers, state, "o" + after)
            if generator is not None or torch.equal(now, state):  # else the loop has drawn numbers too: restore `now`
                left = end
            self._left = end
        finally:
            numbers.set_state(left)
        return order

    def _begin_with(self, state: Tensor) -> None:
        """Draw the order of the next pass from ``state``, and of later passes from the states that follow."""
        self._first = self._known = (self.epoch, state, "o")

    def _reached(self, numbers: torch.Generator) -> tuple[int, Tensor, str]:
        """The next epoch, the state of the random numbers at its begin, and its draws."""
        at, state, draws = self._known if self._known[0] <= self.epoch else self._first
        while at < self.epoch:
            state, _ = self._run(numbers, state, draws)
            at, draws = at + 1, self._draws[1]
        return at, state, draws

    def _run(self, numbers: torch.Generator, state: Tensor, draws: str) -> tuple[Tensor, list[Any]]:
        """Draw from ``state``; returns the state afterwards, and the last order."""
        numbers.set_state(state)
        order: list[Any] = []
        for one in draws:
            if one == "w":
                draw_seed(numbers)
            else:
                order = list(self._given)
        return numbers.get_state(), order


class ShardedSampler(_StandIn, Sampler[Any]):
    """This rank's share of the draw of any sampler (or batch sampler) on rank 0.

    Such samplers may draw differently on every rank, so rank 0 sends its draw to all ranks in each pass: all ranks must
    iterate. The draw may have no end. It is extended to a multiple of the number of ranks with its first elements, or
    cut with ``drop_last``. On a single rank the sampler is iterated as it is.
    """

    _hidden = ("state_dict", "load_state_dict")  # rank 0 draws ahead, and the other ranks do not draw

    def __init__(self, given: Iterable[Any], drop_last: bool) -> None:
        self._drop_last = drop_last
        self._is_used = False
        self._continued: tuple[int, Any] = 0, None  # elements that the next pass skips, and the numbers at its begin
        self._at_begin: Any = None
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        self._is_used = True
        ranks, own = size(), rank()
        (used, numbers), self._continued = self._continued, (0, None)
        first, drawn = self._begin(used, numbers, ranks) if own == 0 else ([], iter(()))
        if ranks == 1:
            yield from drawn
            return
        at = length = max(0, self._length_to_draw(ranks) - used // ranks * ranks) or ranks if own == 0 else 0
        while True:
            part = list(islice(drawn, length)) if own == 0 else []
            first += part[: ranks - len(first)]
            first, part, length = broadcast_object((first, part, length), name="sampler")
            yield from islice(part, own, len(part) // ranks * ranks, ranks)
            if len(part) < length:
                break
            at, length = at + length, min(at, _MOST_DRAWN) // ranks * ranks
        rest = part[len(part) // ranks * ranks :]
        if rest and not self._drop_last:
            yield next(islice(chain(rest, cycle(first)), own, None))

    def __len__(self) -> int:
        return of_each(len(self._given) - self._continued[0], size(), self._drop_last)

    @property
    def used(self) -> int:
        """Elements that the next pass skips, because they are used."""
        return self._continued[0]

    def at_begin(self) -> Any:
        """The random numbers of rank 0 when the pass in progress began there; None on other ranks."""
        return self._at_begin

    def continue_at(self, used: int, at_begin: Any) -> None:
        """Have the next pass continue one that began with the numbers ``at_begin``, after ``used`` elements.

        The pass draws these elements again, to skip them.
        """
        self._continued = used, at_begin

    def _begin(self, used: int, numbers: Any, ranks: int) -> tuple[list[Any], Iterator[Any]]:
        """On rank 0: the first of the ``used`` elements, and an iterator over the rest of the draw."""
        generators = [
            generator
            for one in (self._given, getattr(self._given, "sampler", None))
            if isinstance(generator := getattr(one, "generator", None), torch.Generator)
        ]
        if numbers is None:
            self._at_begin = states(), [one.get_state() for one in generators]
            return [], iter(self._given)
        self._at_begin = numbers
        process, own = numbers
        for generator, state in zip(generators, own, strict=False):
            generator.set_state(state)
        drawn = AgreedNumbers(None, process["torch"], process, False).drawn_by(self._given)
        first = list(islice(drawn, min(used, ranks)))
        next(islice(drawn, used - len(first), used - len(first)), None)
        return first, drawn

    def _length_to_draw(self, ranks: int) -> int:
        """More than the sampler's length, if known, so that one message has the whole draw."""
        return ((length_of(self._given) or 0) // ranks + 1) * ranks


class ShardedIterable(_StandIn, IterableDataset[Any]):
    """Every p-th element of an iterable data set, which yields the same on all p ranks.

    If the last elements are fewer than p, they are extended with earlier ones, or dropped with ``drop_last``, so that
    all ranks make the same number of steps. A data set in the rank's own process draws ``numbers``.
    """

    def __init__(self, given: Iterable[Any], drop_last: bool, numbers: AgreedNumbers) -> None:
        self._drop_last = drop_last
        self._numbers = numbers
        self._is_used = False
        self._place = rank(), size()
        self._begun_at: list[int] = [0]  # elements of each worker's stream that all ranks had used before the pass
        self._is_continued = False  # a pass was continued: from then on numbers are agreed ones, even on one rank
        self._continued: _Place | None = None  # where the next pass begins
        self._ends: Tensor | None = None  # elements that each worker has yielded in the pass, if it has ended
        self._elements: Any = None  # the iterator of the pass in progress, without workers
        self._at_start: Any = None  # the data set's state at its first element, if the last pass continued another
        self._loaded: Any = None  # the state to continue from, until the pass has read an element
        self._is_loaded = False  # `_loaded` is for the next pass
        self._given = given

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return self.__dict__ | {"_ends": None, "_elements": None}
        return self.__dict__ | {"_numbers": None, "_elements": None}  # a worker draws its own random numbers

    def __iter__(self) -> Iterator[Any]:
        self._is_used = True
        own, ranks = self._follow_ranks()
        worker = get_worker_info()
        given: Any = self._given
        elements: Any
        place, self._continued = self._continued, None
        if ranks == 1 and worker is None and place is None and not self._is_continued:
            self._elements = iter(given)
            return iter(self._elements)
        is_agreed = worker is None and (ranks > 1 or self._is_continued)
        state = place.state if place is not None else None
        if state is not None and "dataset" in state:
            self._load(state["dataset"])
        elif self._at_start is not None and not self._is_loaded:
            given.load_state_dict(self._at_start)
            self._at_start = self._loaded = None
        self._is_loaded = False
        if state is not None and is_agreed:
            self._numbers.set_now(state["numbers"])
        elements = self._numbers.drawn_by(given) if is_agreed else iter(given)
        if state is not None and "iterator" in state:
            elements.load_state_dict(state["iterator"])
        if place is not None and state is None:
            used = place.used[worker.id if worker is not None else 0]
            next(islice(elements, used, used), None)
        kind = StatefulTurns if hasattr(elements, "state_dict") else Turns
        turns = kind(elements, own, ranks, self._drop_last)
        self._elements = turns
        if worker is not None and self._ends is not None:
            turns.note_end_in(self._ends[worker.id : worker.id + 1])
        return turns

    def _load(self, state: Any) -> None:
        if self._at_start is None:
            self._at_start = self._given.state_dict()
        self._given.load_state_dict(state)
        self._loaded, self._is_loaded = state, True

    def __len__(self) -> int:
        _, ranks = self._follow_ranks()
        used = sum(self._continued.used) if self._continued is not None else 0
        return of_each(len(self._given) - used, ranks, self._drop_last)

    def begin(self, workers: int, are_new: bool) -> None:
        """Begin a pass with this number of workers, which have served no other pass if they ``are_new``."""
        self._begun_at = [0] * max(1, workers) if self._continued is None else self._continued.used
        if workers and (are_new or self._ends is None):
            self._ends = torch.empty(workers, dtype=torch.int64, device="cpu")
            self._ends.share_memory_()  # type: ignore[no-untyped-call]
        if self._ends is not None:
            self._ends.fill_(-1)
        self._elements = None

    def place(self, batches: int, batch_size: int) -> dict[str, Any]:
        """The position after ``batches`` batches of each rank's loop, for `continue_at`."""
        limits = [math.inf]
        if self._ends is not None:
            up = 0 if self._drop_last else batch_size - 1
            limits = [(end + up) // batch_size if end >= 0 else math.inf for end in self._ends.tolist()]
        each = batch_size * self._place[1]
        used = zip(self._begun_at, batches_of(batches, limits), strict=True)
        return {"used": [before + count * each for before, count in used], "state": self._state()}

    def continue_at(self, place: dict[str, Any] | None) -> None:
        """Have the next pass begin at ``place``; None: at the beginning."""
        self._continued = None if place is None else _Place(place["used"], place["state"])
        self._is_continued = self._is_continued or place is not None

    def _state(self) -> dict[str, Any] | None:
        """The state from which the data set resumes without reading again; None if it cannot."""
        if self._elements is None or loses_elements(self._given):
            return None
        numbers = self._numbers.now() if self._place[1] > 1 or self._is_continued else states()
        for name, one in (("iterator", self._elements), ("dataset", self._given)):
            if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
                return {name: one.state_dict(), "numbers": numbers}
        return None

    def _follow_ranks(self) -> tuple[int, int]:
        """This rank and the number of ranks; in a spawned worker, those of its rank."""
        if is_initialized():
            self._place = rank(), size()
        return self._place


@dataclass
class _Place:
    """A position in a pass over an iterable data set."""

    used: list[int]
    """Elements that all ranks have used of each worker's stream; one number without workers."""
    state: dict[str, Any] | None
    """The state of the data set or its iterator; None if the elements must be read again."""


def loses_elements(dataset: Any) -> bool:
    """Whether a data set's state is incomplete, so that its elements must be read again.

    Shuffled data sets of Hugging Face leave out the elements in their buffer.
    """
    inner, depth = getattr(dataset, "_ex_iterable", None), 0
    while inner is not None and depth < _DEEPEST:
        if "Shuffled" in type(inner).__name__ and hasattr(inner, "buffer_size"):
            return True
        inner, depth = getattr(inner, "ex_iterable", None), depth + 1
    return False


def batches_of(count: int, limits: Sequence[float]) -> list[int]:
    """How many of the first ``count`` batches of a loader came from each worker; ``limits`` is the most of each.

    Workers take turns; one that has ended is skipped.
    """
    came = [0] * len(limits)
    while count and (going := [one for one, limit in enumerate(limits) if came[one] < limit]):
        rounds = int(min(count // len(going), *(limits[one] - came[one] for one in going)))
        for one in going if rounds else going[:count]:
            came[one] += rounds or 1
            count -= rounds or 1
    return came


class StatefulIterable(ShardedIterable):
    """As the base class, for data sets with a state in torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any:
        """The data set's state; before its first read the loaded one, which some data sets do not return until then."""
        has_read = self._elements is not None and self._elements.has_read
        return self._given.state_dict() if self._loaded is None or has_read else self._loaded

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the data set's state for one pass, because a persistent worker serves the next one too."""
        self._load(state_dict)
        self._elements = None


class Turns:
    """Yields element ``own`` of each turn of ``ranks`` elements."""

    def __init__(self, elements: Iterator[Any], own: int, ranks: int, drop_last: bool) -> None:
        self._elements, self._own, self._ranks, self._drop_last = elements, own, ranks, drop_last
        self._spare: list[Any] = []  # the element to yield in the last turn if this rank's is missing
        self._has_ended = False
        self._count = 0
        self._end: Tensor | None = None

    def note_end_in(self, end: Tensor) -> None:
        """At the end, write the number of elements into ``end``, memory of the loader's process."""
        self._end = end

    def __iter__(self) -> Turns:
        return self

    @property
    def has_read(self) -> bool:
        """Whether it has yielded an element, or ended."""
        return self._count > 0 or self._has_ended

    def __next__(self) -> Any:
        try:
            element = self._next()
        except StopIteration:
            if self._end is not None:
                self._end.fill_(self._count)
            raise
        self._count += 1
        return element

    def _next(self) -> Any:
        if self._has_ended:
            raise StopIteration
        turn: list[Any] = []
        for position in range(self._ranks):
            try:
                element = next(self._elements)
            except StopIteration:
                self._has_ended = True
                return self._last(turn, position)
            if position == self._own or not self._spare:
                turn.append(element)
        mine = turn[0] if self._spare else turn[self._own]
        self._spare = self._spare or [mine]
        return mine

    def _last(self, turn: list[Any], count: int) -> Any:
        """The element to yield in the last turn, which has ``count`` elements."""
        if count == 0 or self._drop_last:
            raise StopIteration
        if self._spare:
            return turn[0] if self._own < count else self._spare[0]
        return turn[self._own % count]


class StatefulTurns(Turns):
    """As the base class, for iterators with a state in torchdata's StatefulDataLoader."""

    _elements: Any

    def state_dict(self) -> Any:
        """The iterator's state, between two turns."""
        return self._elements.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the iterator's state."""
        self._elements.load_state_dict(state_dict)
