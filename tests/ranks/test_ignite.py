"""pytorch-ignite's Horovod backend, unchanged: its collectives, its optimizer wrapper, a trainer and a metric."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import ring_notebook.torch as hvd
from ring_notebook.horovod.as_horovod import as_horovod

pytestmark = [
    pytest.mark.sizes(2),  # it only passes on what it is given
    # Not imported here, where there is no Horovod: it looks for one once.
    pytest.mark.skipif(find_spec("ignite") is None, reason="pip install pytorch-ignite to test its Horovod backend"),
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),  # ignite's, at its import
]


@pytest.fixture
def idist() -> Iterator[Any]:
    """``ignite.distributed``, with Horovod as its backend."""
    with as_horovod():
        module = import_module("ignite.distributed")
        module.initialize("horovod")
        yield module
        module.finalize()


def test_it_finds_its_backend(idist: Any, rank: int, size: int) -> None:
    assert (idist.model_name(), idist.backend()) == ("horovod-dist", "horovod")
    assert (idist.get_rank(), idist.get_world_size(), idist.get_nproc_per_node()) == (rank, size, size)


def test_collectives(idist: Any, rank: int, size: int) -> None:
    own = torch.tensor([rank + 1.0, -rank])
    everyone = torch.tensor([[r + 1.0, -r] for r in range(size)])
    for op, wanted in (
        ("SUM", everyone.sum(0)),
        ("AVERAGE", everyone.mean(0)),
        ("MAX", everyone.amax(0)),
        ("MIN", everyone.amin(0)),
    ):
        assert torch.equal(idist.all_reduce(own.clone(), op=op), wanted), op
    assert torch.equal(idist.all_gather(own).reshape(size, 2), everyone)
    assert idist.all_gather(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert torch.equal(idist.broadcast(own.clone(), src=size - 1), everyone[-1])
    assert idist.broadcast("text" if rank == 0 else None, src=0, safe_mode=True) == "text"
    idist.barrier()


def test_a_trainer_and_a_metric(idist: Any, rank: int, size: int) -> None:
    engine, metrics = import_module("ignite.engine"), import_module("ignite.metrics")
    torch.manual_seed(rank)
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs.sum(1) > 0).long()
    model = idist.auto_model(nn.Linear(4, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5 * size))
    assert hasattr(optimizer, "skip_synchronize"), "it is a DistributedOptimizer"
    data = [(inputs[rank::size], labels[rank::size])]
    engine.create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss()).run(data, max_epochs=30)
    hvd.check(model)
    evaluator = engine.create_supervised_evaluator(model, metrics={"accuracy": metrics.Accuracy()})
    evaluator.run(data)
    with torch.no_grad():
        right = model(inputs).argmax(1).eq(labels).float().mean().item()
    assert evaluator.state.metrics["accuracy"] == pytest.approx(right)
    assert right > 0.8
