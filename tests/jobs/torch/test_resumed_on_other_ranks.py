"""A pass that three ranks began continues on two and on one: no sample comes twice, and none is left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.programs import ringrun

pytestmark = pytest.mark.usefixtures("forked_ranks")
COUNT = 48
PROGRAM = """
import json, random, sys
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
import ring_notebook.torch as ring

class Permuted:
    def __iter__(self):
        return iter(random.sample(range(COUNT), COUNT))
    def __len__(self):
        return COUNT

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, COUNT, step))

class Told(IterableDataset):
    at = 0
    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield self.at - 1
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state_dict):
        assert state_dict["at"] % 6 == 0
        self.at = state_dict["at"]

COUNT, folder, done = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ring.init()
loaders = {
    "map": DataLoader(range(COUNT), 2, shuffle=True),
    "sampler": DataLoader(range(COUNT), 2, sampler=Permuted()),
    "stream": DataLoader(Stream(), 2),
    "workers": DataLoader(Stream(), 2, num_workers=2),
    "told": DataLoader(Told(), 2),
}
loaders = dict(zip(loaders, ring.prepare(*loaders.values())))
saved = ring.checkpoint(*loaders.values(), folder=folder, every=f"{done or 100} steps", resume=not done)
passes = {name: iter(loader) for name, loader in loaders.items()}
found = {name: [] for name in loaders}
if done:
    for _ in range(done):
        for name, one in passes.items():
            found[name] += next(one).tolist()
        ring.barrier()
        saved.step()
else:
    for name, one in passes.items():
        found[name] += [number for batch in one for number in batch.tolist()]
        again = sorted(sum(ring.allgather_object([one for batch in loaders[name] for one in batch.tolist()]), []))
        assert again == [*range(COUNT)], (name, again)
print(json.dumps(found))
"""


def run(ranks: int, folder: Path, steps: int) -> tuple[dict[str, list[int]], str]:
    """What all ranks used, by loader, and what was said."""
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(COUNT), folder, str(steps)]
    done = ringrun("-np", str(ranks), *program)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == ranks, done.stdout
    return {name: [one for row in rows for one in row[name]] for name in rows[0]}, done.stdout


@pytest.mark.slow
def test_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    before, _ = run(3, tmp_path, 2)
    for ranks in (2, 1):
        after, said = run(ranks, tmp_path, 0)
        for name, used in before.items():
            assert len(used) == 12
            assert sorted(used + after[name]) == [*range(COUNT)], name
        assert "Stream is read again to skip 12 elements" in said
        assert "Permuted draws 12 elements again" in said
        assert "Told" not in said
