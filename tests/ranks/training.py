"""A small training problem, and the single process that a data-parallel training has to equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

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
    return [
        (torch.randn(size * BATCH, 7, generator=generator), torch.randn(size * BATCH, 3, generator=generator))
        for _ in range(steps)
    ]


def share(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The part of a joint batch that a rank trains on."""
    rows = slice(rank * BATCH, (rank + 1) * BATCH)
    return batch[0][rows], batch[1][rows]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train_alone(model: nn.Module, build: Build, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """What one process does with the joint batches."""
    optimizer = build(model)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def assert_same(model: nn.Module, reference: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal parameters, to the rounding of float32 sums in another order."""
    for (name, mine), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
