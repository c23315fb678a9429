"""Trains each case of the command line with so many logical ranks, and writes bits of what it computes to a file."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

import ring_notebook.torch as ring

SAMPLES = 64


class Augmented(Dataset[Any]):
    """Samples that draw all kinds of random numbers of the process that reads them, if ``noise`` is not 0."""

    def __init__(self, shape: tuple[int, ...], noise: float, words: int = 0) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, *shape, generator=numbers)
        if words:
            self.inputs = torch.randint(words, (SAMPLES, *shape), generator=numbers)
        self.targets = torch.randint(4, (SAMPLES,), generator=numbers)
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        one = self.inputs[index]
        if self.noise:
            one = one + self.noise * (torch.randn(()) + random.random() + np.random.rand())
        return one, self.targets[index]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        self.inner = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))
        self.register_buffer("calls", torch.zeros(()))  # each logical rank counts its own

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.words(x) + self.places(torch.arange(8))
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x[:, -1]) + 0.01 * self.calls


def mlp(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 4))


def resnet() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), Block(8), Block(8), *head)


MODELS = {
    "mlp": (mlp, (3, 2, 2), 0.1, 0),
    "exact": (lambda: mlp(0.0), (3, 2, 2), 0.0, 0),
    "resnet": (resnet, (3, 8, 8), 0.1, 0),
    "gpt": (GPT, (8,), 0.0, 16),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def seed() -> None:
    """Of rank 0; those of others must not matter."""
    number = 7 if ring.rank() == 0 else 100 + ring.rank()
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def bits(tensors: Any) -> str:
    return hashlib.blake2b(b"".join(one.detach().numpy().tobytes() for one in tensors), digest_size=8).hexdigest()


def noted(losses: dict[int, list[str]], loss: Tensor) -> None:
    losses.setdefault(ring.logical_rank(), []).append(loss.item().hex())


def by_rank(losses: dict[int, list[str]]) -> list[Any]:
    return sorted(pair for one in ring.allgather_object(losses) for pair in one.items())


def state_of(optimizer: Any) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]


def turns() -> int:
    """The logical ranks of this rank."""
    first, end = ((ring.rank() + one) * ring.logical_size() // ring.size() for one in (0, 1))
    return int(end - first)


def in_rounds(loader: Any, steps: int) -> Iterator[Any]:
    """Passes over a loader until so many steps are made."""
    while steps > 0:
        yield from loader
        steps -= len(loader) // turns()


def train(case: str, logical: int | None, steps: int) -> dict[str, Any]:
    name, kind, *extras = case.split("-")
    make, shape, noise, words = MODELS[name]
    seed()
    model: nn.Module = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    generator = torch.Generator().manual_seed(3) if "generator" in extras else None
    data = Augmented(shape, noise, words)
    workers = 2 if "workers" in extras else 0
    loader: Any = DataLoader(data, 2, shuffle=True, drop_last=True, num_workers=workers, generator=generator)
    tests: Any = DataLoader(data, 4)
    model, optimizer, loader, tests = ring.prepare(model, optimizer, loader, tests, logical=logical)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in extras, init_scale=4096.0, growth_interval=3)
    losses: dict[int, list[str]] = {}
    for count, (x, y) in enumerate(in_rounds(loader, steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in extras):
            loss = F.cross_entropy(model(x), y)
        poison = float("inf") if "scaler" in extras and count // turns() == 1 else 1.0
        scaler.scale(loss * poison).backward()
        if "clip" in extras:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if "twice" in extras:  # another pass of the same turn
            (0.1 * F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        noted(losses, loss)
    model.eval()
    tested: dict[int, list[str]] = {}
    with torch.no_grad():
        for x, y in tests:
            noted(tested, F.cross_entropy(model(x), y))
    return {
        "losses": by_rank(losses),
        "tested": by_rank(tested),
        "weights": bits(model.parameters()),
        "buffers": bits(model.buffers()),
        "state": bits(state_of(optimizer)),
        "rate": schedule.get_last_lr(),
        "scale": scaler.get_scale(),
        "numbers": [torch.rand(()).item(), random.random(), np.random.rand()],
    }


def two(logical: int | None, steps: int) -> dict[str, Any]:
    """Two optimizers, whose passes reach parameters of each other."""
    seed()
    maker, judge = nn.Linear(3, 12), nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
    of_maker, of_judge = OPTIMIZERS["adam"](maker.parameters()), OPTIMIZERS["sgd"](judge.parameters())
    loader: Any = DataLoader(Augmented((12,), 0.0), 2, shuffle=True, drop_last=True)
    maker, judge, of_maker, of_judge, loader = ring.prepare(maker, judge, of_maker, of_judge, loader, logical=logical)
    losses: dict[int, list[str]] = {}
    for x, _ in in_rounds(loader, steps):
        drawn = x[:, :3]
        of_maker.zero_grad()
        loss = F.softplus(-judge(maker(drawn)).mean())
        loss.backward()
        of_judge.zero_grad()  # drops what that pass has given it
        F.softplus(-judge(x).mean()).backward()
        F.softplus(judge(maker(drawn).detach()).mean()).backward()
        of_judge.step()
        of_maker.step()
        noted(losses, loss)
    both = [*maker.parameters(), *judge.parameters()]
    return {"losses": by_rank(losses), "weights": bits(both), "state": bits([*state_of(of_maker), *state_of(of_judge)])}


def alone(logical: int, steps: int) -> dict[str, Any]:
    """Without a loader, and with gradients that add up over rounds."""
    seed()
    model: Any = nn.Linear(5, 3)
    model, optimizer = ring.prepare(model, OPTIMIZERS["sgd"](model.parameters()), logical=logical)
    losses: dict[int, list[str]] = {}
    for step in ring.logical_turns(range(steps)):
        loss = (model(torch.randn(4, 5)) * (ring.logical_rank() + 1)).square().mean()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        noted(losses, loss)
    return {"losses": by_rank(losses), "weights": bits(model.parameters()), "state": bits(state_of(optimizer))}


def main() -> None:
    path, logical, steps, *cases = sys.argv[1:]
    ring.init()
    number = int(logical) or None
    found = {}
    for case in cases:
        if case == "two":
            found[case] = two(number, int(steps))
        elif case == "alone":
            assert number is not None
            found[case] = alone(number, int(steps))
        else:
            found[case] = train(case, number, int(steps))
    if ring.rank() == 0:
        with open(path, "w") as file:
            json.dump(found, file)


main()
