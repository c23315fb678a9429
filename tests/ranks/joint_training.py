"""A small training problem, and the single process that a data-parallel training has to equal."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ranks.values import randn

BATCH = 6
STEPS = 20

Build = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers and an odd number of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def make_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def joint_batches(size: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """The batches of a single process: those of all ranks, one after another."""
    generator = torch.Generator().manual_seed(1)
    return [(randn(generator, size * BATCH, 7), randn(generator, size * BATCH, 3)) for _ in range(steps)]


def share(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The part of a joint batch that a rank trains on."""
    rows = slice(rank * BATCH, (rank + 1) * BATCH)
    return batch[0][rows], batch[1][rows]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(batch[0].to(dtype)), batch[1].to(dtype))


Step = Callable[[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]], object]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that shows every difference: it keeps state, and decays what has a gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def assert_trains_alike(
    hvd: ModuleType,
    step: Step = plain_step,
    build: Build = momentum,
    make: Callable[[], nn.Module] = make_model,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **options: Any,
) -> None:
    """Train on all ranks and alone, with the same ``step``; ``options`` are the DistributedOptimizer's.

    ``step`` is called with the joint batch alone, and with each rank's share on the ranks.
    """
    reference, model = make(), make()
    batches = joint_batches(hvd.size())
    alone = build(reference)
    for batch in batches:
        step(reference, alone, batch)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(build(model), named_parameters=model.named_parameters(), **options)
    for batch in batches:
        step(model, optimizer, share(batch, hvd.rank()))
    assert_same(model, reference, rtol, atol)


def assert_same(model: nn.Module, reference: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal parameters, to the rounding of float32 sums in another order."""
    for (name, mine), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
