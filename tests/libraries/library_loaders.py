"""Loaders of other libraries, divided by `prepare` and compared, step by step, with one process: a rank's program."""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HuggingFaceDataset
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import (
    DataListLoader,
    DenseDataLoader,
    DynamicBatchSampler,
    ImbalancedSampler,
    RandomNodeLoader,
    TemporalDataLoader,
)
from torch_geometric.loader import (
    DataLoader as GraphLoader,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ring_notebook.torch as ring

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from ranks.training.test_loaders import ByLength, Drawn, Numbers, Range, Shuffled, collate, seeded

__all__ = ["CASES", "main"]

COUNT, BATCH, SEED = 48, 4, 7
MAP = Numbers(COUNT)


@dataclass
class Case:
    """``make(batch)`` makes the loader of a program."""

    make: Callable[[int], Any]
    joins: bool = False
    """The batch of p ranks is p batches of one process, where the program does not say how large a batch is."""
    ordered: bool = True
    passes: int = 3


def stateful(dataset: Any = MAP, **options: Any) -> Callable[[int], Any]:
    return lambda batch: StatefulDataLoader(dataset, **{"batch_size": batch, **options})


def graphs() -> list[Data]:
    edges = torch.tensor([[0, 1], [1, 0]])
    return [Data(x=torch.full((2, 1), float(one)), edge_index=edges, y=torch.tensor([one % 2])) for one in range(COUNT)]


def rows() -> HuggingFaceDataset:
    return HuggingFaceDataset.from_dict({"id": list(range(COUNT))})


def events() -> TemporalData:
    at = torch.arange(COUNT)
    return TemporalData(src=at, dst=at + 1, t=at, msg=at.view(-1, 1).float())


class Epochs(ByLength):
    """A batch sampler with an epoch that is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        numbers = random.Random(self.epoch).sample(range(COUNT), COUNT)
        return iter([numbers[at : at + BATCH] for at in range(0, COUNT, BATCH)])


PERSISTENT = {"num_workers": 2, "persistent_workers": True}
CASES = {
    "torchdata": Case(stateful()),
    "torchdata, shuffle": Case(stateful(shuffle=True)),
    "torchdata, generator": Case(lambda batch: StatefulDataLoader(MAP, batch, shuffle=True, generator=seeded())),
    "torchdata, forked workers": Case(stateful(shuffle=True, num_workers=2)),
    # A spawned worker imports all of the above: seconds. `tests/ranks` has more of them.
    "torchdata, spawned workers": Case(
        stateful(shuffle=True, num_workers=1, multiprocessing_context="spawn"), passes=1
    ),
    "torchdata, persistent workers": Case(stateful(shuffle=True, prefetch_factor=4, **PERSISTENT)),
    "torchdata, workers in any order": Case(stateful(shuffle=True, num_workers=2, in_order=False), ordered=False),
    "torchdata, unbatched": Case(stateful(batch_size=None), joins=True),
    "torchdata, own sampler": Case(lambda batch: StatefulDataLoader(MAP, batch, sampler=Drawn(COUNT))),
    "torchdata, own batch sampler": Case(
        lambda batch: StatefulDataLoader(MAP, batch_sampler=Epochs(SequentialSampler(range(COUNT)), BATCH, False)),
        joins=True,
    ),
    "torchdata, batch sampler": Case(
        lambda batch: StatefulDataLoader(MAP, batch_sampler=BatchSampler(RandomSampler(MAP), batch, True))
    ),
    "torchdata, collate": Case(stateful(collate_fn=collate)),
    "torchdata, iterable": Case(stateful(Range(0, COUNT))),
    "torchdata, iterable, workers": Case(stateful(Range(0, COUNT, splits=True), num_workers=2)),
    "torchdata, iterable, persistent workers": Case(stateful(Range(0, COUNT, splits=True), **PERSISTENT)),
    "torchdata, iterable, drawn": Case(stateful(Shuffled(COUNT, "torch"))),
    "PyG": Case(lambda batch: GraphLoader(graphs(), batch)),
    "PyG, shuffle": Case(lambda batch: GraphLoader(graphs(), batch, shuffle=True)),
    "PyG, workers": Case(lambda batch: GraphLoader(graphs(), batch, shuffle=True, num_workers=2)),
    "PyG, persistent workers": Case(lambda batch: GraphLoader(graphs(), batch, shuffle=True, **PERSISTENT)),
    "PyG, imbalanced": Case(lambda batch: GraphLoader(graphs(), batch, sampler=ImbalancedSampler(graphs(), COUNT))),
    "PyG, dynamic batches": Case(
        lambda batch: GraphLoader(graphs(), batch_sampler=DynamicBatchSampler(graphs(), 2 * BATCH, shuffle=True)),
        joins=True,
    ),
    "PyG, lists": Case(lambda batch: DataListLoader(graphs(), batch, shuffle=True)),
    "PyG, dense": Case(lambda batch: DenseDataLoader(graphs(), batch, shuffle=True)),
    "PyG, random nodes": Case(
        lambda batch: RandomNodeLoader(
            Data(x=torch.arange(COUNT).view(-1, 1), edge_index=torch.zeros(2, 0, dtype=torch.long)), num_parts=12
        ),
        joins=True,
    ),
    "PyG, events in time": Case(lambda batch: TemporalDataLoader(events(), batch_size=batch), joins=True),
    "Hugging Face": Case(lambda batch: StatefulDataLoader(rows().with_format("torch"), batch, shuffle=True)),
    "Hugging Face, workers": Case(
        lambda batch: torch.utils.data.DataLoader(rows().with_format("torch"), batch, shuffle=True, num_workers=2)
    ),
    "Hugging Face, iterable": Case(
        lambda batch: torch.utils.data.DataLoader(rows().to_iterable_dataset(num_shards=4), batch)
    ),
    "Hugging Face, iterable, shuffle": Case(
        lambda batch: torch.utils.data.DataLoader(
            rows().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=16), batch
        )
    ),
    "Hugging Face, iterable, workers": Case(
        lambda batch: torch.utils.data.DataLoader(rows().to_iterable_dataset(num_shards=4), batch, num_workers=2)
    ),
    "Hugging Face, iterable, StatefulDataLoader": Case(
        lambda batch: StatefulDataLoader(rows().to_iterable_dataset(num_shards=4), batch, num_workers=2)
    ),
    "Hugging Face, iterable, StatefulDataLoader, persistent": Case(
        lambda batch: StatefulDataLoader(rows().to_iterable_dataset(num_shards=4), batch, **PERSISTENT)
    ),
}


def numbers(batch: Any) -> list[int]:
    """The samples in a batch of any of these loaders."""
    if isinstance(batch, dict):
        return numbers(batch["id"])
    if isinstance(batch, TemporalData):
        return numbers(batch.src)
    if isinstance(batch, Data):
        return numbers(batch.x)
    if isinstance(batch, list):
        return [*chain(*map(numbers, batch))]
    return [int(one) for one in batch.flatten()] if isinstance(batch, Tensor) else [int(batch)]


def alone(case: Case) -> list[list[list[int]]]:
    """For each pass the sorted samples of each step of one process."""
    loader = case.make(BATCH if case.joins else BATCH * ring.size())
    found = []
    for number in range(case.passes):
        set_epoch(loader, number)
        steps = [numbers(one) for one in loader]
        if case.joins:
            steps = [[*chain(*steps[at : at + ring.size()])] for at in range(0, len(steps), ring.size())]
        found.append([sorted(one) for one in steps])
    return found


def set_epoch(loader: Any, number: int) -> None:
    """As programs do where a part has it."""
    for part in (loader.batch_sampler, loader.dataset):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)


def together(case: Case, loader: Any) -> list[list[list[int]]]:
    """The same of all ranks."""
    found = []
    for number in range(case.passes):
        set_epoch(loader, number)
        found.append([sorted(chain(*ring.allgather_object(numbers(one)))) for one in loader])
    return found


def outcome(case: Case) -> str:
    """Empty where the ranks have the samples of one process."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    expected = alone(case)
    torch.manual_seed(SEED + 10 * ring.rank())
    random.seed(SEED + 10 * ring.rank())
    loader = case.make(BATCH)
    if ring.rank() > 0 and loader.generator is not None:
        loader.generator.manual_seed(1)  # rank 0's counts
    found = together(case, ring.prepare(loader))
    if not case.ordered:
        expected, found = ([sorted(chain(*one)) for one in both] for both in (expected, found))  # type: ignore[misc]
    return "" if found == expected else f"expected {expected}, got {found}"


RESUMED = {
    **{
        name: CASES[name]
        for name in ("torchdata, shuffle", "torchdata, forked workers", "torchdata, own batch sampler")
    },
    **{name: CASES[name] for name in ("torchdata, iterable", "torchdata, iterable, workers", "Hugging Face, workers")},
    **{name: case for name, case in CASES.items() if name.startswith("Hugging Face, iterable")},
}
"""Loaders that continue in the middle of a pass."""
READ_AGAIN = {"torchdata, iterable", "torchdata, iterable, workers", "Hugging Face, iterable, shuffle"}
READ_AGAIN |= {"Hugging Face, iterable, workers"}


def resumed(name: str) -> str:
    """Empty where a loader continues behind the batches after which its state was taken on rank 0, and once more.

    The second time it has got one batch, and other workers have read nothing yet. The next pass is a whole one.
    """
    case = RESUMED[name]
    expected = alone(case)[0]
    torch.manual_seed(SEED)
    random.seed(SEED)
    found: list[list[int]] = []
    state = None
    for count in (2, 1, None):
        loader = case.make(BATCH)
        set_epoch(loader, 0)
        again = ring.prepare(loader)
        if state is not None:
            again.load_state_dict(state)
        found += [sorted(chain(*ring.allgather_object(numbers(one)))) for one in islice(again, count)]
        state = ring.broadcast_object(again.state_dict(), name="state")
    order: Any = sorted if name.endswith("iterable, workers") else list  # the first of them begins again
    if order(found) != order(expected):
        return f"expected {expected}, got {found}"
    after = sorted(chain(*(chain(*ring.allgather_object(numbers(one))) for one in again)))
    if after != sorted(chain(*expected)):
        return f"the pass behind it has {after}"
    said = "read again" in again.about_continuation
    return "" if said == (name in READ_AGAIN) else f"said: {again.about_continuation}"


def main(folder: str) -> None:
    """Write what became of each case to ``folder/RANK.json``."""
    ring.init()
    report = {}
    tries = {name: partial(outcome, case) for name, case in CASES.items()}
    tries |= {f"{name}, resumed": partial(resumed, name) for name in RESUMED}
    for name, one in tries.items():
        ring.init()
        ring.barrier()
        torch.manual_seed(SEED)
        random.seed(SEED)
        try:
            report[name] = one()
        except Exception:
            report[name] = traceback.format_exc()
            ring.shutdown()
    Path(folder, f"{ring.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
