"""Whatever a loader is made of, prepare gives the samples and the order of one process, divided among the ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)


class Numbers(Dataset[int]):
    """0, 1, ... ``count`` - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Range(IterableDataset[int]):
    """``start``, ... ``end`` - 1; in a loader with workers, each has a part if ``splits``."""

    def __init__(self, start: int, end: int, splits: bool = False) -> None:
        self.start, self.end, self.splits = start, end, splits
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = range(self.start + self.epoch, self.end + self.epoch)
        worker = get_worker_info()
        if worker is not None and self.splits:
            assert worker.dataset is self
            return islice(numbers, worker.id, None, worker.num_workers)
        return iter(numbers)


class Sized(Range):
    """A range that has a length."""

    def __len__(self) -> int:
        return self.end - self.start


class Shuffled(IterableDataset[int]):
    """Numbers in an order that is drawn from ``source`` in each pass."""

    def __init__(self, count: int, source: str) -> None:
        self.count, self.source = count, source

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.count))
        if self.source == "torch":
            yield from torch.randperm(self.count, device="cpu").tolist()
        elif self.source == "numpy":
            yield from np.random.permutation(self.count).tolist()
        else:
            while numbers:
                yield numbers.pop(random.randrange(len(numbers)))


def of_documentation(worker: int) -> None:
    """The pattern of torch's documentation of IterableDataset."""
    info = get_worker_info()
    assert info is not None
    own: Any = info.dataset
    assert type(own) is Range
    each = (own.end - own.start) // info.num_workers
    own.start += worker * each
    own.end = own.start + each


def sets_parts(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    own: Any = info.dataset
    middle = own.end // 2
    own.start, own.end = (own.start, middle) if worker == 0 else (middle, own.end)


class ByLength(BatchSampler):
    """A batch sampler that is not torch's own: batches of even numbers, then of odd ones, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        drawn = list(self.sampler)
        random.shuffle(drawn)
        for remainder in (0, 1):
            one = [index for index in drawn if index % 2 == remainder]
            yield from (one[at : at + self.batch_size] for at in range(0, len(one), self.batch_size))


class Drawn(Sampler[int]):
    """A sampler that is not torch's own and draws by Python's random numbers, anew for each epoch that is set."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield (random.randrange(self.count) + self.epoch) % self.count

    def __len__(self) -> int:
        return self.count


class Unsized:
    """Any iterable will do for a sampler."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count)[::-1])


class Ambiguous(Unsized):
    """As PyG's DynamicBatchSampler, whose length is an error of another kind."""

    def __len__(self) -> int:
        raise ValueError("the length is undefined")


class Doubling(DataLoader[Any]):
    """A loader whose own loop changes the batches."""

    factor = 2

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


class _RepeatSampler:
    """As in timm and Ultralytics."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """timm's loader that keeps its workers: one pass without an end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = _RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        batch_sampler: Any = self.batch_sampler
        return len(batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


def collate(rows: list[int]) -> list[int]:
    return [row + 1000 for row in rows]


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """``make(batch, size)`` makes the loader of a program."""

    make: Callable[[int, int], DataLoader[Any]]
    joins: bool = False
    """The batch of p ranks is p batches of one process, where the program does not say how large a batch is."""
    ordered: bool = True
    slow: bool = False
    passes: int = 3


def samples(size: int) -> int:
    return 24 * size


def of_numbers(**options: Any) -> Callable[[int, int], DataLoader[Any]]:
    return lambda batch, size: DataLoader(Numbers(samples(size)), batch, **options)


def sampled(sampler: Callable[[int], Any], **options: Any) -> Callable[[int, int], DataLoader[Any]]:
    return lambda batch, size: DataLoader(Numbers(samples(size)), batch, sampler=sampler(samples(size)), **options)


def batched(batch_sampler: Callable[[int, int], Any], **options: Any) -> Callable[[int, int], DataLoader[Any]]:
    return lambda batch, size: DataLoader(
        Numbers(samples(size)), batch_sampler=batch_sampler(batch, samples(size)), **options
    )


def streamed(
    dataset: Callable[[int], Any] = lambda count: Range(0, count), **options: Any
) -> Callable[[int, int], DataLoader[Any]]:
    return lambda batch, size: DataLoader(dataset(samples(size)), **{"batch_size": batch, **options})


class Made:
    """Makes a loader with a new generator each time."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, batch: int, size: int) -> DataLoader[Any]:
        return DataLoader(Numbers(samples(size)), batch, shuffle=True, generator=seeded(), **self.options)


PERSISTENT = {"num_workers": 2, "persistent_workers": True}
CASES = {
    "plain": Case(of_numbers()),
    "shuffle": Case(of_numbers(shuffle=True)),
    "shuffle, generator": Case(Made()),
    "workers": Case(of_numbers(shuffle=True, num_workers=2)),
    "workers, generator": Case(Made(num_workers=2), slow=True),
    "persistent workers": Case(of_numbers(shuffle=True, **PERSISTENT)),
    "persistent workers, generator": Case(Made(**PERSISTENT, prefetch_factor=4), slow=True),
    "workers in any order": Case(of_numbers(shuffle=True, num_workers=2, in_order=False), ordered=False, slow=True),
    "workers of a server": Case(
        of_numbers(shuffle=True, num_workers=1, multiprocessing_context="forkserver"), slow=True
    ),
    "collate": Case(of_numbers(collate_fn=collate)),
    "drop_last": Case(lambda batch, size: DataLoader(Numbers(24 * size - 1), batch, drop_last=True)),
    "unbatched": Case(lambda batch, size: DataLoader(Numbers(samples(size)), batch_size=None), joins=True),
    "unbatched, shuffle": Case(
        lambda batch, size: DataLoader(Numbers(samples(size)), batch_size=None, shuffle=True, generator=seeded()),
        joins=True,
    ),
    "sampler of fewer": Case(sampled(lambda count: SequentialSampler(range(count // 2)))),
    "subset": Case(sampled(lambda count: SubsetRandomSampler(range(0, count, 2)))),
    "subset, generator": Case(sampled(lambda count: SubsetRandomSampler(range(0, count, 2), seeded()))),
    "weighted": Case(sampled(lambda count: WeightedRandomSampler([*range(1, count + 1)], count))),
    "weighted, generator": Case(sampled(lambda count: WeightedRandomSampler([1.0] * count, count, False, seeded()))),
    "replacement": Case(sampled(lambda count: RandomSampler(range(count), replacement=True, num_samples=2 * count))),
    "more samples": Case(sampled(lambda count: RandomSampler(range(count), num_samples=2 * count, generator=seeded()))),
    "own sampler": Case(sampled(Drawn)),
    "list for a sampler": Case(sampled(lambda count: [*range(0, count, 2)])),
    "own sampler without length": Case(sampled(Unsized)),
    "own sampler with an undefined length": Case(sampled(Ambiguous)),
    "batch sampler": Case(batched(lambda batch, count: BatchSampler(RandomSampler(range(count)), batch, True))),
    "batch sampler, collate": Case(
        batched(lambda batch, count: BatchSampler(SequentialSampler(range(count)), batch, False), collate_fn=collate)
    ),
    "batch sampler over own": Case(batched(lambda batch, count: BatchSampler(Drawn(count), batch, True))),
    "own batch sampler": Case(
        batched(lambda batch, count: ByLength(SequentialSampler(range(count)), batch, False)), joins=True
    ),
    "list of batches": Case(
        batched(lambda batch, count: [[*range(at, at + batch)] for at in range(0, count, batch)]), joins=True
    ),
    "subclass": Case(lambda batch, size: Doubling(Numbers(samples(size)), batch, shuffle=True)),
    "one pass without end": Case(
        lambda batch, size: MultiEpochs(Numbers(samples(size)), batch, generator=seeded(), shuffle=True)
    ),
    "one pass without end, workers": Case(
        # Its workers have drawn an order before prepare saw it.
        lambda batch, size: MultiEpochs(Numbers(samples(size)), batch, shuffle=True, num_workers=2),
        ordered=False,
        slow=True,
    ),
    "iterable": Case(streamed()),
    "iterable with length": Case(streamed(lambda count: Sized(0, count))),
    "iterable, unbatched": Case(streamed(batch_size=None), joins=True),
    "iterable, drop_last": Case(streamed(lambda count: Range(0, count - 1), drop_last=True)),
    "iterable, workers": Case(streamed(lambda count: Range(0, count, splits=True), num_workers=2)),
    "iterable, repeated by workers": Case(streamed(num_workers=2), slow=True),
    "iterable, persistent workers": Case(streamed(lambda count: Range(0, count, splits=True), **PERSISTENT), slow=True),
    "iterable, worker_init_fn reads": Case(streamed(num_workers=2, worker_init_fn=of_documentation)),
    "iterable, worker_init_fn sets": Case(streamed(num_workers=2, worker_init_fn=sets_parts), slow=True),
    "iterable, spawned workers": Case(
        streamed(num_workers=2, worker_init_fn=of_documentation, multiprocessing_context="spawn"), slow=True, passes=1
    ),
    "iterable, drawn by torch": Case(streamed(lambda count: Shuffled(count, "torch"))),
    "iterable, drawn by Python": Case(streamed(lambda count: Shuffled(count, "python"))),
    "iterable, drawn by numpy": Case(streamed(lambda count: Shuffled(count, "numpy"))),
    "iterable, drawn by torch, generator": Case(
        lambda batch, size: DataLoader(Shuffled(samples(size), "torch"), batch, generator=seeded())
    ),
    "iterable, drawn in workers": Case(streamed(lambda count: Shuffled(count, "python"), num_workers=2)),
}


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def flat(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return batch.flatten().tolist()  # type: ignore[no-any-return]
    return batch if isinstance(batch, list) else [batch]


def passes_of_one_process(case: Case, batch: int, size: int) -> list[list[list[int]]]:
    """For each pass the sorted samples of each step."""
    loader = case.make(batch if case.joins else batch * size, size)
    found = []
    for _ in range(case.passes):
        steps = [flat(one) for one in loader]
        if case.joins:
            steps = [[*chain(*steps[at : at + size])] for at in range(0, len(steps), size)]
        found.append([sorted(one) for one in steps])
    return found


# On a busy machine, the workers of four ranks import torch for minutes: those of a server in each pass.
SLOW = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW * case.slow) for name, case in CASES.items()])
def test_steps_have_the_samples_of_one_process(hvd: ModuleType, name: str) -> None:
    case, size, batch = CASES[name], hvd.size(), 4
    reseed(7)
    alone = passes_of_one_process(case, batch, size)
    reseed(7 + 10 * hvd.rank())
    given = case.make(batch, size)
    if hvd.rank() > 0 and given.generator is not None:
        given.generator.manual_seed(1)  # rank 0's counts
    loader = hvd.prepare(given)
    assert isinstance(loader, type(given))
    assert type(loader).__name__ == type(given).__name__
    together = []
    for _ in range(case.passes):
        steps = []
        for one in loader:
            parts = hvd.allgather_object(flat(one))
            assert len({len(part) for part in parts}) == 1
            steps.append(sorted(chain(*parts)))
        together.append(steps)
    if case.ordered:
        assert together == alone
    else:
        assert [sorted(chain(*one)) for one in together] == [sorted(chain(*one)) for one in alone]
    for attribute in ("batch_size", "drop_last", "collate_fn", "num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(loader, attribute) == getattr(given, attribute)
    assert hvd.prepare(loader) is loader


def steps_of(hvd: ModuleType, loader: Any) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    return [sorted(chain(*hvd.allgather_object(flat(batch)))) for batch in loader]


def test_attributes_and_methods_are_those_of_the_user(hvd: ModuleType) -> None:
    count = samples(hvd.size())
    sampler, stream = Drawn(count), Range(0, count)
    given = DataLoader(Numbers(count), 4, sampler=sampler)
    given.note = "mine"
    loader = hvd.prepare(given)
    assert loader.note == "mine"
    assert loader.dataset is given.dataset
    random.seed(3)
    before = steps_of(hvd, loader)
    loader.sampler.set_epoch(1)
    assert (sampler.epoch, loader.sampler.count) == (1, count)
    random.seed(3)
    assert steps_of(hvd, loader) == [sorted((one + 1) % count for one in step) for step in before]
    loader.sampler.epoch = 0
    random.seed(3)
    assert steps_of(hvd, loader) == before
    batches = hvd.prepare(DataLoader(Numbers(count), batch_sampler=ByLength(sampler, 4, False)))
    batches.batch_sampler.sampler.set_epoch(2)
    assert sampler.epoch == 2
    assert (batches.batch_sampler.batch_size, batches.batch_size) == (4, None)
    streamed = hvd.prepare(DataLoader(stream, 4))
    streamed.dataset.set_epoch(5)
    assert stream.epoch == streamed.dataset.epoch == 5
    assert [*chain(*steps_of(hvd, streamed))] == list(range(5, count + 5))
    doubling = hvd.prepare(Doubling(Numbers(count), 4))
    doubling.factor = 10
    assert [*chain(*steps_of(hvd, doubling))] == list(range(0, 10 * count, 10))


def test_the_seed_of_a_program_decides_the_order(hvd: ModuleType) -> None:
    """Also when it seeds its generator again, as one process would draw then; and when a rank has another seed."""
    size = hvd.size()

    def orders(loader: Any, batch: Callable[[Any], list[int]]) -> list[list[list[int]]]:
        found = []
        for seed in (3, 4, 3):
            loader.generator.manual_seed(seed)
            found += [[batch(one) for one in loader] for _ in range(2)]
        return found

    alone = orders(Made()(4 * size, size), lambda one: sorted(flat(one)))
    loader = hvd.prepare(Made()(4, size))
    assert orders(loader, lambda one: sorted(chain(*hvd.allgather_object(flat(one))))) == alone
    loader.generator.manual_seed(hvd.rank())
    assert sorted(chain(*steps_of(hvd, loader))) == list(range(samples(size)))
    torch.manual_seed(1 + hvd.rank())
    first = steps_of(hvd, hvd.prepare(DataLoader(Numbers(samples(size)), 4, shuffle=True)))
    torch.manual_seed(1 + hvd.rank())
    two = hvd.prepare(*(DataLoader(Numbers(samples(size)), 4, shuffle=True) for _ in range(2)))
    assert steps_of(hvd, two[0]) == first
    assert steps_of(hvd, two[1]) != first  # loaders that are prepared together do not draw alike


@pytest.mark.parametrize("source", ["sampler", "iterable"])
def test_a_look_at_a_batch_changes_no_order(hvd: ModuleType, source: str) -> None:
    def made() -> Any:
        data = Numbers(count) if source == "sampler" else Shuffled(count, "torch")
        return hvd.prepare(DataLoader(data, 4, shuffle=True if source == "sampler" else None, generator=seeded()))

    count = samples(hvd.size())
    undisturbed = [steps_of(hvd, loader) for loader in [made()] for _ in range(3)]
    loader, orders = made(), []
    for number in range(3):
        if hvd.rank() == number % hvd.size():
            next(iter(loader))
        orders.append(steps_of(hvd, loader))
    assert orders == undisturbed or hvd.size() == 1


def test_what_is_a_share_already_is_left_alone(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()
    data = Numbers(samples(size))
    torchs: Any = torch.utils.data.distributed.DistributedSampler(data, size, rank)
    stream = Range(rank, samples(size))
    stream.world_size, stream.rank = size, rank  # type: ignore[attr-defined]
    elastic = hvd.elastic.ElasticSampler(data)
    for loader in (
        DataLoader(data, 4, sampler=torchs),
        DataLoader(data, batch_sampler=BatchSampler(torchs, 4, False)),
        DataLoader(data, 4, sampler=elastic),
        DataLoader(data, 4, sampler=hvd.DistributedSampler(data)),
        DataLoader(stream, 4),
    ):
        assert hvd.prepare(loader) is loader or size == 1
    whole: Any = torch.utils.data.distributed.DistributedSampler(data, 1, 0, shuffle=False)
    loader = hvd.prepare(DataLoader(data, 4, sampler=whole))
    assert [*chain(*steps_of(hvd, loader))] == list(range(len(data)))


class Loose(DataLoader[Any]):
    """A loader whose own loop knows nothing of samplers."""

    def __iter__(self) -> Any:
        return iter([torch.arange(4)])


@pytest.mark.sizes(3, slow=(2,))  # nothing is divided on a single rank
def test_what_cannot_be_divided_raises_and_names_the_part(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()
    data = Numbers(samples(size))
    other: Any = torch.utils.data.distributed.DistributedSampler(data, size + 1, rank)
    with pytest.raises(ValueError, match=rf"DistributedSampler has the share of rank {rank} of {size + 1}; leave"):
        hvd.prepare(DataLoader(data, batch_sampler=BatchSampler(other, 4, False)))
    with pytest.raises(
        ValueError, match=r"rank 0 a DataLoader over SequentialSampler with 0 samples.*rank 1 a .* 1 sam"
    ):
        hvd.prepare(DataLoader(Numbers(rank), 4))
    with pytest.raises(TypeError, match=r"its own __iter__ yields a batch that does not come from its sampler"):
        next(iter(hvd.prepare(Loose(data, 4))))


SPLITS: dict[str, Callable[[torch.Generator], DataLoader[Any]]] = {
    "random_split": lambda g: DataLoader(random_split(Numbers(40), [30, 10], g)[0], 4),
    "random_split of one": lambda g: DataLoader(ConcatDataset([random_split(Numbers(40), [30, 10], g)[0], Numbers(9)])),
    "indices": lambda g: DataLoader(Numbers(40), 4, sampler=SubsetRandomSampler(torch.randperm(40, generator=g)[:30])),
    "arrays": lambda g: DataLoader(TensorDataset(torch.eye(40)[torch.randperm(40, generator=g)[:30]].cumsum(1)), 4),
    "arrays and labels": lambda g: DataLoader(Rows(np.arange(40.0)[torch.randperm(40, generator=g)], np.ones(40)), 4),
    "names of files": lambda g: DataLoader(Rows([f"/data/{n}.png" for n in torch.randperm(40, generator=g)]), 4),
    "paths": lambda g: DataLoader(Rows([Path(f"/data/{n}.png") for n in torch.randperm(40, generator=g)]), 4),
    "array of names": lambda g: DataLoader(Rows(np.array([f"{n}.png" for n in torch.randperm(40, generator=g)])), 4),
    "names and classes": lambda g: DataLoader(Rows([(str(n), n % 2) for n in torch.randperm(9, generator=g).tolist()])),
    "records": lambda g: DataLoader(Rows([{"x": x, "y": 0.0} for x in torch.randn(40, generator=g).tolist()]), 4),
    "list of row numbers": lambda g: DataLoader(Rows(torch.randperm(40, generator=g)[:30].tolist()), 4),
    "sorted row numbers": lambda g: DataLoader(Rows((10**6 + torch.randperm(99, generator=g)[:60].sort()[0]).tolist())),
    "sorted array": lambda g: DataLoader(Rows((10**6 + torch.randperm(99, generator=g)[:60].sort()[0]).numpy())),
    "list of numbers": lambda g: DataLoader(Rows(torch.randn(40, generator=g).tolist()), 4),
    "list of tensors": lambda g: DataLoader(Rows([*torch.randn(40, 3, generator=g)]), 4),
    "frame": lambda g: DataLoader(Rows(frame().iloc[torch.randperm(40, generator=g)[:30].numpy()]), 4),
    "frame, new index": lambda g: DataLoader(Rows(frame().sample(30, random_state=seed_of(g), ignore_index=True))),
    "frame, index only": lambda g: DataLoader(Rows(frame()[["label"]].sample(30, random_state=seed_of(g))), 4),
    "column of a frame": lambda g: DataLoader(Rows(frame()["x"].sample(30, random_state=seed_of(g))), 4),
    "complex": lambda g: DataLoader(TensorDataset(torch.randn(9, 2, dtype=torch.cfloat, generator=g)), 4),
}
ALIKE: dict[str, Callable[[torch.Generator], DataLoader[Any]]] = {
    "batches": lambda g: DataLoader(Numbers(40), batch_sampler=BatchSampler(torch.randperm(40, generator=g), 4, False)),
    "noise": lambda g: DataLoader(TensorDataset(torch.arange(40), torch.randn(40, 2, generator=g)), 4),
    "rounding": lambda g: DataLoader(Rows(np.arange(40.0) + 1e-6 * torch.rand(40, generator=g).numpy()), 4),
    "folders": lambda g: DataLoader(Rows([f"/{torch.rand(1, generator=g)}/{n}.png" for n in range(40)]), 4),
    "few values": lambda g: DataLoader(Rows(torch.randint(2, (40,), generator=g), torch.zeros(40, 3)), 4),
    "list and noise": lambda g: DataLoader(Rows([*range(40)], torch.randn(40, generator=g).tolist()), 4),
    "list of few values": lambda g: DataLoader(Rows(torch.randint(2, (40,), generator=g).tolist()), 4),
    "objects": lambda g: DataLoader(Rows([object() for _ in range(40)]), 4),
    "frame and noise": lambda g: DataLoader(Rows(frame().assign(noise=torch.randn(40, generator=g).numpy())), 4),
    "cache of a rank": lambda g: DataLoader(Rows([*range(40)], [None] * int(torch.randint(9, (), generator=g))), 4),
    "no rows": lambda g: DataLoader(Rows(frame().iloc[:0], []), 4),
    "nothing": lambda g: DataLoader(TensorDataset(torch.zeros(0, 3)), 4),
    "no columns": lambda g: DataLoader(TensorDataset(torch.zeros(4, 0)), 4),
    "keys": lambda g: DataLoader(Subset(Rows({"a": 1, "b": 2}), ["a", "b"]), 4),  # type: ignore[arg-type]
    "read-only": lambda g: DataLoader(Rows(np.broadcast_to(np.arange(9.0), (40, 9))), 4),
    "endless": lambda g: DataLoader(Subset(Numbers(10**10), range(10**9)), 4),
}


def seed_of(generator: torch.Generator) -> int:
    return generator.initial_seed()


def frame() -> Any:
    return pandas.DataFrame({"name": [f"{n}.wav" for n in range(40)], "x": np.linspace(0, 9, 40), "label": 20 * [0, 1]})


class Rows(Dataset[Any]):
    def __init__(self, *parts: Any) -> None:
        self.x, *self.others = self.parts = parts

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return [part[index] for part in self.parts]


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.sizes(2)
def test_a_split_that_each_rank_has_drawn_itself_raises(hvd: ModuleType, name: str) -> None:
    """It would train on samples that another rank validates on. A seed makes it right."""

    def split(seed: int) -> None:
        hvd.prepare(SPLITS[name](torch.Generator().manual_seed(seed)))

    with pytest.raises(ValueError, match=r"the ranks gave prepare different samples: those of rank 1.*random_state=0"):
        split(hvd.rank())
    split(3)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.sizes(2)
def test_what_may_differ_by_rank_beside_the_samples(hvd: ModuleType, name: str) -> None:
    hvd.prepare(ALIKE[name](torch.Generator().manual_seed(hvd.rank())))


@pytest.mark.parametrize("name", ["shuffle, generator", "subclass", "own sampler", "iterable", "one pass without end"])
def test_a_copy_of_a_loader_yields_what_it_yields(hvd: ModuleType, name: str) -> None:
    loader = hvd.prepare(CASES[name].make(4, hvd.size()))
    steps_of(hvd, loader)
    found = []
    copies: tuple[Callable[[Any], Any], ...] = (lambda one: pickle.loads(pickle.dumps(one)), deepcopy, copy)
    for copied in copies:  # the last one shares the sampler
        again = copied(loader)
        assert type(again) is type(loader)
        assert vars(again).keys() == vars(loader).keys()
        reseed(3)
        found.append(steps_of(hvd, again))
    assert found == [found[0]] * 3
