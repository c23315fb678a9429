"""memory: what it predicts beside what a training then holds."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_notebook.core.metrics import drain_params, expected_loads


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.wide, self.thin = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT).softmax(-1) @ v)
        return x + self.thin(nn.functional.gelu(self.wide(x)))


class Language(nn.Module):
    """A small one, its head tied to its embedding; ``saves``: blocks are computed again in backward."""

    def __init__(self, saves: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Attention(32) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(9)
        self.saves = saves

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.embed(tokens)), 0.1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def nbytes(tensors: Any) -> int:
    own = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return sum({one.data_ptr(): one.numel() * one.element_size() for one in own}.values())


def state_of(optimizer: Any) -> list[Tensor]:
    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]


def kept_by(model: Any, batch: dict[str, Tensor]) -> tuple[Any, int]:
    """The loss, and the bytes of what forward has saved for it, besides weights and the batch."""
    known = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers(), *batch.values()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch)
    return loss, sum(one.untyped_storage().nbytes() for one in saved.values())


def batch_of(rows: int) -> dict[str, Tensor]:
    tokens = torch.arange(9 * rows).view(rows, 9) % 50
    return {"tokens": tokens, "labels": tokens.clone()}


class Tables(torch.optim.SGD):
    """Keeps a table of codes where its last parameter was, as optimizers of 8 bits do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.tables = {"codes": torch.arange(256.0)}

    def step(self, closure: Any = None) -> Any:
        for one in self.param_groups[0]["params"]:
            self.tables["codes"] = self.tables["codes"].to(one.device)
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "tables": Tables,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_it_is_what_a_step_holds(hvd: ModuleType, kind: str, saves: bool, frozen: bool) -> None:
    model = Language(saves)
    if frozen:
        model.blocks.requires_grad_(False)
        model.blocks[2].requires_grad_(True)
    optimizer = OPTIMIZERS[kind]([one for one in model.parameters() if one.requires_grad])
    batch = batch_of(16)
    before = [one.clone() for one in (*model.state_dict().values(), torch.get_rng_state())]
    need = hvd.memory(model, optimizer, batch)
    for one, other in zip(before, (*model.state_dict().values(), torch.get_rng_state()), strict=True):
        assert torch.equal(one, other)
    assert not optimizer.state
    model, optimizer = hvd.prepare(model, optimizer)
    loss, kept = kept_by(model, batch)
    loss.backward()
    optimizer.step()
    assert need.weights == nbytes([*model.parameters(), *model.buffers()])
    assert need.gradients == nbytes(one.grad for one in model.parameters() if one.grad is not None)
    assert need.optimizer == nbytes(state_of(optimizer))
    assert abs(need.activations - kept) < 0.02 * kept
    again = hvd.memory(model, optimizer, batch)
    assert (again.weights, again.gradients, again.optimizer) == (need.weights, need.gradients, need.optimizer)


@pytest.mark.sizes(1)
@pytest.mark.parametrize("rows", [2, 3, 4, 128])
def test_batch_normalization_refuses_a_single_value_of_a_channel(hvd: ModuleType, rows: int) -> None:
    images = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()  # of 3 x 3 pixels
    model = nn.Sequential(*images, nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    batch = {"input": torch.randn(rows, 3, 3, 3)}
    need = hvd.memory(model, None, batch)
    _, kept = kept_by(model, batch)
    assert abs(need.activations - kept) < 0.02 * kept


@pytest.mark.sizes(1, 3, slow=(2,))  # of 33 rows the last of four has fewer
def test_shares_of_a_sharded_model(hvd: ModuleType, size: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(4)))
    optimizer: Any = torch.optim.Adam(model.parameters())
    x = torch.ones(16, 33)
    need = hvd.memory(model, optimizer, x, strategy="fsdp")
    largest = 2 * 4 * (33 * 33 + 33)
    sharded, optimizer = hvd.prepare(model, optimizer, strategy="fsdp")
    sharded(x).sum().backward()
    optimizer.step()
    padding = 1.2 if size > 1 else 1.0
    shares = nbytes(sharded.parameters())
    assert shares / padding <= need.weights - (largest if size > 1 else 0) <= shares * padding
    assert need.optimizer / padding <= nbytes(state_of(optimizer)) <= need.optimizer * padding
    after = hvd.memory(sharded, optimizer, x)
    assert after.weights - largest == shares
    assert after.gradients == nbytes(one.grad for one in sharded.parameters())
    assert after.optimizer == nbytes(state_of(optimizer))


@pytest.mark.sizes(1)
def test_the_process_comes_to_what_is_sent_to_the_notebook(hvd: ModuleType) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(4, 2048)
    model, optimizer = hvd.prepare(model, optimizer)
    hvd.memory(model, optimizer, x)
    assert "memory" not in (drain_params() or {}), "it is no hyper-parameter"
    expected = expected_loads()["memory_expected"]
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    reached = psutil.Process().memory_info().rss
    grown = 3 * nbytes(model.parameters())
    assert reached - before > 0.8 * grown
    assert -0.1 * grown < reached - expected < 0.3 * grown, (before, reached, expected)  # and temporary tensors


@pytest.mark.sizes(1)
def test_its_text(hvd: ModuleType) -> None:
    kind = type(hvd.memory(nn.Linear(2, 2)))
    need = kind(
        weights=6_200_000_000, gradients=80_000_000, optimizer=300_000_000, activations=3 * 10**9, available=15 * 10**9
    )
    assert str(need) == "9.6 GB of 15: weights 6.2, gradients 0.1, optimizer 0.3, activations about 3.0"
    tight = kind(weights=6_200_000, gradients=0, optimizer=0, activations=0, available=2_000_000)
    assert str(tight).startswith(
        "6.2 MB of 2.0: weights 6.2, gradients 0.0, optimizer 0.0. It does not fit: take fewer"
    )
    small = kind(weights=75_000, gradients=75_000, optimizer=150_000, activations=0, available=14_600_000_000)
    assert str(small) == "300 kB of 15 GB: weights 75, gradients 75, optimizer 150"
    with pytest.raises(TypeError, match="memory"):
        hvd.memory("model")
    with pytest.raises(ValueError, match="strategy must be 'ddp' or 'fsdp', got 'zero'"):
        hvd.memory(nn.Linear(2, 2), strategy="zero")


@pytest.mark.sizes(1)
def test_an_optimizer_with_kernels_of_its_own(hvd: ModuleType) -> None:
    """Which cannot be tried without memory: a part of the parameter is, and the state scaled."""

    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for one in group["params"]:
                    one.grad.numpy()
                    self.state[one]["codes"] = torch.zeros(one.numel(), dtype=torch.int8)

    model = nn.Linear(3000, 2000, bias=False)
    assert hvd.memory(model, Own(model.parameters(), {"lr": 1.0})).optimizer == 6_000_000
