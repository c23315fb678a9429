"""Gradients as bytes, by PowerSGD and by what the link carries; run by all ranks of a job over several hosts."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ring_notebook.torch as ring
from ring_notebook.core import world
from ring_notebook.errors import CollectiveMismatch

INT8: Any = ring.Compression.int8
POWER: Any = ring.Compression.powersgd(4)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def assert_equal_on_ranks(tensors: list[Tensor], what: str) -> None:
    rows = ring.allgather_object([one.detach().clone().flatten().view(torch.uint8) for one in tensors])
    for row in rows[1:]:
        assert all(map(torch.equal, row, rows[0])), f"{what}: ranks have drifted apart"


def optimizer_of(parameters: list[Any], compression: Any, lr: float = 1.0, **options: Any) -> Any:
    return ring.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), compression=compression, **options)


def check_sums() -> None:
    """Random shapes and types, with any ranks and hosts: an average or a sum to half a scale at each of two roundings,
    the same bits on all ranks, and after many the truth to the same error: what is left does not add up."""
    dice = random.Random(7)
    rank, size = ring.rank(), ring.size()
    for trial in range(8):
        dtype = dice.choice(FLOATS)
        shapes = [
            [dice.choice((1, 3, 17, 64, 200)) for _ in range(dice.randrange(4))] for _ in range(dice.randrange(1, 5))
        ]
        shapes += [[0], [dice.choice((900, 1024, 3001))]]
        op = dice.choice((ring.Average, ring.Sum))
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        optimizer = optimizer_of(parameters, INT8, op=op)
        totals = [torch.zeros(shape) for shape in shapes]
        truths = [torch.zeros(shape) for shape in shapes]
        generator = torch.Generator().manual_seed(trial)
        for step in range(6):
            rows = [torch.randn(size, *shape, generator=generator).to(dtype).float() for shape in shapes]
            optimizer.zero_grad()
            sum((p.float() * row[rank]).sum() for p, row in zip(parameters, rows, strict=True)).backward()
            gradients = [p.grad for p in parameters]
            assert_equal_on_ranks(gradients, f"trial {trial}, step {step}, {shapes}")
            largest = max(float(row.abs().max()) for row in rows if row.numel())
            for total, truth, grad, row in zip(totals, truths, gradients, rows, strict=True):
                total += grad.float()
                truth += row.mean(0) if op == ring.Average else row.sum(0)
            factor = size if op == ring.Sum else 1
            # Of each host's sum at the first rounding and of the whole at the second, with what earlier ones have left.
            bound = 2.2 * factor * largest * 1.05 / 254 + 0.02 * (dtype != torch.float32) * factor * (step + 1)
            for total, truth in zip(totals, truths, strict=True):
                if truth.numel():
                    assert (total - truth).abs().max() <= bound, (trial, step, dtype, op)
        if sum(one.numel() for one in parameters) >= 1024:
            assert optimizer._reducer._residuals, "they did not travel as bytes"


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return torch.tensor(loaded.images.reshape(-1, 64) / 16, dtype=torch.float32), torch.tensor(loaded.target)


def train_digits(compression: Any, steps: int = 150, **options: Any) -> tuple[float, list[Tensor]]:
    """The loss on rows that no rank trains on, and the weights."""
    x, y = digits()
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ring.prepare(model, plain, compression=compression, **options)
    generator = torch.Generator().manual_seed(ring.rank())
    for _ in range(steps):
        chosen = torch.randint(1400, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        ring.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    assert_equal_on_ranks(weights, repr(compression))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x[1400:]), y[1400:])), weights


def check_digits() -> None:
    """A training ends where that of float32 does, with accumulation too, and rounding has been at work."""
    exact, weights = train_digits(ring.Compression.none)
    for compression, within in ((INT8, 0.02), (POWER, 0.15)):
        loss, others = train_digits(compression)
        assert abs(loss / exact - 1) < within, (compression, loss, exact)
        assert not all(map(torch.equal, weights, others)), compression
    exact, _ = train_digits(ring.Compression.none, accumulate=2)
    loss, _ = train_digits(INT8, accumulate=2)
    assert abs(loss / exact - 1) < 0.02


class Gpt(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, 32), nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden: Tensor = self.layers(self.bytes(x) + self.places.weight[: x.shape[1]], mask=mask, is_causal=True)
        return self.out(hidden)


def train_gpt(compression: Any) -> float:
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8)
    text = text.long().clamp_max(127)
    torch.manual_seed(0)
    model = Gpt()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ring.prepare(model, plain, compression=compression)
    generator = torch.Generator().manual_seed(ring.rank())
    losses = []
    for _ in range(80):
        starts = torch.randint(len(text) - 33, (8,), generator=generator).tolist()
        rows = torch.stack([text[start : start + 33] for start in starts])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_equal_on_ranks(list(model.parameters()), repr(compression))
    return float(ring.allreduce(torch.tensor(losses[-20:]).mean()))


def check_gpt() -> None:
    exact, loss = train_gpt(ring.Compression.none), train_gpt(INT8)
    assert abs(loss / exact - 1) < 0.01, (loss, exact)


def check_not_finite() -> None:
    """A NaN of one rank is one on all, the steps after it are as if it had not been, and a scaler leaves it out."""
    for compression in (INT8, POWER):
        for wrong in (float("nan"), float("inf")):
            weights = nn.Parameter(torch.zeros(64, 64))
            optimizer = optimizer_of([weights], compression)
            for step in range(3):
                optimizer.zero_grad()
                weights.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)) / 64
                if step == 1 and ring.rank() == ring.size() - 1:
                    weights.grad[5, 5] = wrong
                optimizer.synchronize()
                assert bool(weights.grad.isfinite().all()) == (step != 1)
                assert_equal_on_ranks([weights.grad], f"{compression}, step {step}")
    weights = nn.Parameter(torch.zeros(64, 64))
    optimizer = optimizer_of([weights], INT8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and ring.rank() == 0
        scaler.scale((weights * (float("inf") if bad else 0.5)).sum()).backward()
        before = weights.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(weights.detach(), before if step == 1 else before - 0.5, atol=0.01, rtol=0)
    assert scaler.get_scale() == 2.0


def check_what_does_not_travel_as_bytes() -> None:
    """Other types, complex numbers, sparse gradients and small buckets are what they are without compression."""
    rank, size = ring.rank(), ring.size()
    mean = (size - 1) / 2
    for compression in (INT8, POWER):
        parameters = [
            nn.Parameter(torch.zeros(2000, dtype=torch.float64)),
            nn.Parameter(torch.zeros(2000, dtype=torch.complex64)),
        ]
        for one in parameters:
            one.grad = torch.full_like(one, rank + 1 / 3)
        optimizer = optimizer_of(parameters, compression)
        optimizer.synchronize()
        for one in parameters:
            torch.testing.assert_close(one.grad, torch.full_like(one, mean + 1 / 3), rtol=1e-6, atol=0)
        small = nn.Parameter(torch.zeros(900))
        small.grad = torch.linspace(0, 1, 900) + rank
        optimizer_of([small], compression).synchronize()
        torch.testing.assert_close(small.grad, torch.linspace(0, 1, 900) + mean, rtol=1e-6, atol=0)
        table = nn.Embedding(5000, 3, sparse=True)
        optimizer = optimizer_of(list(table.parameters()), compression)
        table(torch.tensor([rank, 7])).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense()[7].tolist() == [1.0] * 3
    unused = [nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    optimizer = optimizer_of(unused, INT8)
    for _ in range(2):
        optimizer.zero_grad()
        unused[min(rank, 1)].sum().backward()
        assert unused[2].grad is None
        for one in unused[:2]:
            assert one.grad is not None
        torch.testing.assert_close(unused[0].grad + unused[1].grad, torch.ones(2000), rtol=0.02, atol=0)


def check_passes() -> None:
    """Two backward passes for a step, a retained graph, and channels last."""
    weights = nn.Parameter(torch.zeros(3000))
    optimizer = optimizer_of([weights], INT8, backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (weights * (1 + ring.rank())).sum().backward()
        torch.testing.assert_close(weights.grad, torch.full((3000,), 1.0 + ring.size()), rtol=0.01, atol=0)
    filters = nn.Parameter(torch.zeros(16, 16, 3, 3).to(memory_format=torch.channels_last))
    pattern = torch.arange(16 * 16 * 9.0).view(16, 16, 3, 3)
    for compression, within in ((INT8, 0.01), (POWER, 0.2)):
        optimizer = optimizer_of([filters], compression)
        optimizer.zero_grad()
        (filters * pattern).sum().backward()
        assert (filters.grad - pattern).abs().max() <= within * pattern.max(), compression


def check_power_converges() -> None:
    """A gradient of the same rank comes through; what one of a higher rank lacks comes with later steps."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(60, 3, generator=generator) @ torch.randn(3, 50, generator=generator)
    full = torch.randn(60, 50, generator=generator)
    weights = nn.Parameter(torch.zeros(60, 50))
    for gradient, within in ((low, 1e-4), (full, 0.25)):
        optimizer = optimizer_of([weights], POWER)
        total = torch.zeros(60, 50)
        for _ in range(60):
            optimizer.zero_grad()
            weights.grad = gradient * (1 + ring.rank()) * 2 / (1 + ring.size())
            optimizer.synchronize()
            total += weights.grad
        assert (total / 60 - gradient).norm() <= within * gradient.norm()
        assert_equal_on_ranks([total], "PowerSGD")


def check_process_set() -> None:
    """The first and the last rank alone, which may be on two hosts."""
    size = ring.size()
    if size < 3:
        return
    pair = ring.add_process_set([0, size - 1])
    weights = nn.Parameter(torch.zeros(4000))
    optimizer = optimizer_of([weights], INT8, process_set=pair)
    weights.grad = torch.full((4000,), float(ring.rank()))
    optimizer.synchronize()
    expected = (size - 1) / 2 if pair.included() else float(ring.rank())
    torch.testing.assert_close(weights.grad, torch.full((4000,), expected), rtol=0.01, atol=0)
    ring.remove_process_set(pair)


def check_state() -> None:
    """A state_dict loads as ever, and what was left goes: the continuation is that of any other process.

    A snapshot keeps it: a pickled optimizer continues to the same bits.
    """
    weights = nn.Parameter(torch.zeros(4000))
    optimizer = optimizer_of([weights], INT8)
    weights.grad = torch.linspace(0, 1, 4000)
    optimizer.step()
    gradients = []
    for own, trained in (pickle.loads(pickle.dumps((weights, optimizer))), (weights, optimizer)):
        trained.zero_grad()
        own.grad = torch.linspace(0, 1, 4000) ** 2
        trained.synchronize()
        gradients.append(own.grad)
    assert torch.equal(*gradients)
    fresh = optimizer_of([weights], INT8)
    weights.grad = torch.linspace(0, 1, 4000) ** 2
    fresh.synchronize()
    assert not torch.equal(weights.grad, gradients[0])
    optimizer = optimizer_of([weights], INT8)
    weights.grad = torch.linspace(0, 1, 4000)
    optimizer.step()
    assert optimizer._reducer._residuals
    state = optimizer.state_dict()
    torch.optim.SGD([weights], lr=1.0).load_state_dict(state)
    optimizer.load_state_dict(state)
    assert not optimizer._reducer._residuals


def check_different_ways() -> None:
    """A rank with another compression is told so."""
    compression = INT8 if ring.rank() else POWER
    weights = nn.Parameter(torch.zeros(64, 64))
    weights.grad = torch.ones(64, 64)
    with pytest.raises(CollectiveMismatch, match="give them the same groups, compression and RING_FUSION_THRESHOLD"):
        optimizer_of([weights], compression).synchronize()


def check_choice() -> None:
    """Chosen once, the same on all ranks, and trained with."""
    _, weights = train_digits(ring.Compression.auto, steps=8)
    assert all(one.isfinite().all() for one in weights)


CHECKS: tuple[Callable[[], None], ...] = (
    check_sums,
    check_not_finite,
    check_what_does_not_travel_as_bytes,
    check_passes,
    check_power_converges,
    check_process_set,
    check_state,
    check_digits,
    check_gpt,
    check_different_ways,
    check_choice,
)


def main() -> None:
    ring.init()
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    for check in CHECKS:
        if not wanted or check.__name__ in wanted:
            check()
            os.write(2, f"rank {ring.rank()}: {check.__name__}\n".encode())
    hosts = len(set(world.current().hosts))
    os.write(1, f"rank {ring.rank()} of {ring.size()} on {hosts} hosts: all is well\n".encode())
    ring.shutdown()


if __name__ == "__main__":
    main()
