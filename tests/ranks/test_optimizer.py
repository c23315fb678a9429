"""Data-parallel training equals a single process on the joined batch, for every optimizer and way to use it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from ranks.training import (
    Build,
    assert_same,
    joint_batches,
    loss_of,
    make_model,
    share,
    train_alone,
)

BUILDS: dict[str, Build] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@pytest.mark.parametrize("name", BUILDS)
def test_equals_single_process(hvd: ModuleType, name: str, overlap: str, settings: Callable[..., None]) -> None:
    settings(overlap=overlap, fusion_threshold=256)  # several buckets
    size, rank = hvd.size(), hvd.rank()
    model, reference = make_model(seed=rank), make_model(seed=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(BUILDS[name](model), named_parameters=model.named_parameters())
    batches = joint_batches(size)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, share(batch, rank)).backward()
        optimizer.step()
    train_alone(reference, BUILDS[name], batches)
    assert_same(model, reference)
