"""A training in cells outlives its ranks: the cell that is run again resumes from the last commit on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.cluster.cluster import Cluster

CELL = """
import os, pathlib, signal
import torch
torch.manual_seed(ring.rank())
model = torch.nn.Linear(3, 1)
optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
state = ring.elastic.TorchState(model, optimizer, batch=0)
starts = []
@ring.elastic.run
def train(state):
    starts.append(state.batch)
    while state.batch < 8:
        if state.batch == 5 and ring.rank() == 1 and not pathlib.Path("died").exists():
            pathlib.Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()
train(state)
ring.check(model, optimizer)
ended = (starts, state.batch)
"""


@pytest.mark.parametrize("again", ["restart", "heal"])  # `make test` runs the last one, which starts one rank
def test_the_cell_resumes_from_the_last_commit(again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a notebook's commits are in .ring there
    with Cluster(2) as cluster:
        with pytest.raises(ClusterError, match=r"rank 1 on .*SIGKILL"):
            cluster.run(CELL).wait()
        assert list((tmp_path / ".ring" / "commits").glob("train-*.pt")), "what the dead rank left"
        getattr(cluster, again)()
        cluster.run(CELL).wait()
        assert [cluster.pull("ended", rank) for rank in range(2)] == [([4], 8)] * 2
        assert not list((tmp_path / ".ring" / "commits").iterdir()), "the training has ended"
        cluster.run(CELL).wait()
        assert [cluster.pull("ended", rank) for rank in range(2)] == [([0], 8)] * 2
