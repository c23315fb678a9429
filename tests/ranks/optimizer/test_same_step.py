"""Ranks whose steps or weights have parted are told so at the next step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ring_notebook.torch as ring
from ring_notebook.errors import CollectiveMismatch, DriftError

pytestmark = [pytest.mark.sizes(2, 3), pytest.mark.usefixtures("hvd")]


class TwoPhase(torch.optim.SGD):
    """Steps under another name."""

    def second_step(self) -> None:
        super().step()


def prepared(make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.1)) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))
    return ring.prepare(model, make(model.parameters()))  # type: ignore[no-any-return]


def one_pass(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(ring.rank()))
    model(x).square().mean().backward()


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


@torch.no_grad()
def clamp_one(model: nn.Module) -> None:
    model[2].weight.clamp_(-0.01, 0.01)  # type: ignore[index]


def reset_one(model: nn.Module) -> None:
    nn.init.ones_(model[0].bias)  # type: ignore[index]


def swap(model: nn.Module) -> None:
    model[2].weight.data = torch.zeros(1, 20)  # type: ignore[index]


@pytest.mark.parametrize("change", [decay, clamp_one, reset_one, swap])
@pytest.mark.parametrize("step", ["step", "second_step"])
def test_weights_that_one_rank_changes_are_named_at_its_next_step(
    change: Callable[[nn.Module], None], step: str
) -> None:
    model, optimizer = prepared(lambda p: TwoPhase(p, lr=0.1))
    for number in range(5):
        one_pass(model, optimizer)
        if number == 3 and ring.rank() == 1:
            change(model)
        if number == 3:
            with pytest.raises(DriftError, match=r"before step 4 .*(0|2)\.(weight|bias)"):
                getattr(optimizer, step)()
            break
        getattr(optimizer, step)()
    model, optimizer = ring.prepare(model, optimizer)
    one_pass(model, optimizer)
    getattr(optimizer, step)()
    ring.check(model, optimizer)


@pytest.mark.sizes(2)  # Adasum takes a power of two of ranks
@pytest.mark.parametrize("options", [{"op": ring.Adasum}, {"sync_every": 2}, {"accumulate": 2}], ids=str)
def test_where_step_alone_is_counted_another_one_is_refused(options: dict[str, Any]) -> None:
    model = nn.Linear(30, 1)
    model, optimizer = ring.prepare(model, TwoPhase(model.parameters(), lr=0.1), **options)
    one_pass(model, optimizer)
    with pytest.raises(RuntimeError, match=r"a step of another name"):
        optimizer.second_step()
    optimizer.step()


@pytest.mark.parametrize("change", [decay, clamp_one, reset_one, swap])
def test_what_all_ranks_change_alike_is_theirs_to_change(change: Callable[[nn.Module], None]) -> None:
    model, optimizer = prepared()
    for _ in range(3):
        one_pass(model, optimizer)
        change(model)
        optimizer.step()


def test_rounding_is_a_warning_once() -> None:
    model, optimizer = prepared()
    for number in range(4):
        one_pass(model, optimizer)
        if number == 1 and ring.rank() == 1:
            with torch.no_grad():
                model[0].weight.mul_(1 + 1e-6)
        if number == 1 and ring.rank() == 0:
            with pytest.warns(UserWarning, match="differ by rounding"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_rank_that_is_a_step_ahead_is_named() -> None:
    """Its steps are of gradients that it has set itself, so that no backward pass is in the way."""
    _, optimizer = prepared()
    optimizer.step()
    if ring.rank() == 0:
        optimizer.same_step._made += 1
    with pytest.raises(CollectiveMismatch) as found:
        optimizer.step()
    assert set(re.findall(r"optimizer step (\d)", str(found.value))) == {"2", "3"}


def test_a_rank_that_leaves_out_a_step_is_told_at_the_next_collective() -> None:
    model, optimizer = prepared()
    with pytest.raises(CollectiveMismatch, match="backward pass 2"):  # noqa: PT012
        for number in range(3):
            one_pass(model, optimizer)
            if number == 0 and ring.rank() == 1:
                continue
            optimizer.step()


def test_other_scales_of_gradients_are_named() -> None:
    model, optimizer = prepared()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + ring.rank()))
    with pytest.raises(CollectiveMismatch, match="at scale 8"):  # noqa: PT012
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 30)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()


def test_an_expanded_tensor_is_named() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("scales", torch.ones(1).expand(4))
    with pytest.raises(ValueError, match=r"'scales' of shape \(4,\) is expanded"):
        ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_parameters_and_buffers(kind: torch.dtype) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 3), 1.0 + ring.rank(), dtype=kind))
            self.register_buffer("turn", torch.full((2,), 1j * ring.rank(), dtype=kind))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).abs().square()

    model = Spectral()
    model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert model.turn.tolist() == [0, 0]
    model(torch.full((1, 3), 1.0 + ring.rank(), dtype=kind)).mean().backward()
    grad = model.weight.grad
    assert grad is not None
    squares = sum((1 + rank) ** 2 for rank in range(ring.size())) / ring.size()
    torch.testing.assert_close(grad, torch.full((3, 3), 2.0 * squares, dtype=kind))
    optimizer.step()
    ring.check(model, optimizer)


def test_step_takes_the_arguments_of_its_class() -> None:
    class Sized(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None, *, bs: int = 1) -> Any:  # type: ignore[override]
            self.bs = bs
            return super().step(closure)

    model, optimizer = prepared(lambda p: Sized(p, lr=0.1))
    one_pass(model, optimizer)
    optimizer.step(bs=8)
    assert optimizer.bs == 8
    optimizer.step(lambda: model(torch.ones(1, 30)).mean(), bs=4)
    assert optimizer.bs == 4
