"""The life of a DistributedOptimizer: as torch's, re-run, copied, joined, across epochs, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ranks.joint_training import loss_of, make_model, momentum, plain_step


def test_is_an_optimizer_of_the_same_class(hvd: ModuleType) -> None:
    model = make_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups[0] is inner.param_groups[0]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
    assert calls == ["pre"], "step hooks run once"
    plain = torch.optim.Adam(make_model().parameters(), lr=0.5)
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
    assert float(optimizer.state[model.first.weight]["step"]) == 2


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
@pytest.mark.parametrize("options", [{}, {"op": 1, "backward_passes_per_step": 2}, {"sync_every": 2}], ids=str)
def test_a_copy_averages_gradients_too(hvd: ModuleType, kind: str, options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
    batch = torch.full((2, 7), 1.0 + hvd.rank()), torch.ones(2, 3)
    plain_step(model, optimizer, batch)
    other, twin = (
        copy.deepcopy((model, optimizer)) if kind == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
    )
    assert type(twin).__mro__[1:] == type(optimizer).__mro__[1:]
    assert list(twin._parameter_names.values()) == list(optimizer._parameter_names.values())
    assert list(twin._parameter_names) == list(other.parameters())
    torch.testing.assert_close(twin.state_dict(), optimizer.state_dict())
    for _ in range(3):
        plain_step(model, optimizer, batch)
        plain_step(other, twin, batch)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)


def test_a_shallow_copy_is_the_same_optimizer(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    for one in (copy.copy(optimizer), optimizer):
        plain_step(model, one, (torch.ones(2, 7), torch.ones(2, 3)))


def test_a_process_of_no_rank_unpickles_the_wrapped_optimizer(hvd: ModuleType) -> None:
    written = pickle.dumps(hvd.DistributedOptimizer(momentum(make_model())))
    hvd.shutdown()
    assert type(pickle.loads(written)) is torch.optim.SGD
    hvd.init()


@pytest.mark.sizes(1, 2, 3, slow=(4,))  # Adasum takes a power of two of ranks
@pytest.mark.parametrize("options", [{}, {"op": 2}], ids=["reducing", "adasum"])
def test_groups_and_state_stay_shared(hvd: ModuleType, options: dict[str, Any]) -> None:
    """A schedule made before wrapping sets every rank's rate, whichever of the two optimizers has loaded something."""
    if hvd.size() == 3 and "op" in options:
        pytest.skip("three ranks are no power of two")
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, **options)
    for expected, load in [(0.5, None), (0.25, "broadcast"), (0.125, optimizer), (0.0625, inner)]:
        if load == "broadcast":
            hvd.broadcast_optimizer_state(optimizer, 0)
        elif load is not None:
            load.load_state_dict(optimizer.state_dict())
        plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == expected
        assert optimizer.state is inner.state


def test_rank_0_gives_its_state_between_steps(hvd: ModuleType, settings: Callable[..., None]) -> None:
    """Only the other ranks load it; what all have agreed on for the next step holds."""
    settings(overlap="thread")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    for _ in range(3):
        plain_step(model, optimizer, (torch.ones(2, 7), torch.ones(2, 3)))
        hvd.broadcast_optimizer_state(optimizer, 0)


@pytest.mark.sizes(1, 2, slow=(4,))  # Adasum takes a power of two of ranks
def test_newest_wins_over_other_kinds(hvd: ModuleType) -> None:
    model = make_model()
    old = hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum)
    plain_step(model, old, (torch.ones(2, 7), torch.ones(2, 3)))
    new = hvd.DistributedOptimizer(momentum(model))
    with pytest.raises(RuntimeError, match="newer DistributedOptimizer"):
        old.step()
    plain_step(model, new, (torch.ones(2, 7), torch.ones(2, 3)))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_join_lets_the_others_make_more_steps(
    hvd: ModuleType, settings: Callable[..., None], overlap: str, scaled: bool
) -> None:
    """Rank r has data for r steps; the gradients of those that have joined are zeros."""
    settings(overlap=overlap)
    size, rank = hvd.size(), hvd.rank()
    w = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0))
    scaler = torch.amp.GradScaler(torch.get_default_device().type, enabled=scaled)
    for _ in range(rank):
        optimizer.zero_grad()
        scaler.scale(w.sum() * (rank + 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert hvd.join() == size - 1
    there = [[r + 1 for r in range(size) if r > step] for step in range(rank)]
    torch.testing.assert_close(w.detach(), torch.full((3,), -sum(sum(step) for step in there) / size))


@pytest.mark.parametrize("overlap", ["inline", "thread"])
def test_a_rank_that_had_joined_goes_on_with_the_others(
    hvd: ModuleType, settings: Callable[..., None], overlap: str
) -> None:
    """In the first epoch rank 0 has no data at all, and a layer is frozen while only the last rank has any left."""
    settings(overlap=overlap)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    batch = torch.ones(2, 7), torch.ones(2, 3)
    last = hvd.size() - 1
    for steps in (2 * hvd.rank(), 2, 1 + hvd.rank(), 2):
        for step in range(steps):
            model.first.requires_grad_(not (hvd.rank() == last and step > last))
            plain_step(model, optimizer, batch)
        model.first.requires_grad_()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)


def test_zero_grad_while_gradients_are_being_reduced(hvd: ModuleType, settings: Callable[..., None]) -> None:
    """They are waited for and dropped, and the next round is not disturbed."""
    settings(overlap="thread")
    model, alone = make_model(), make_model()
    optimizer, single = hvd.DistributedOptimizer(momentum(model)), momentum(alone)
    batch = torch.ones(2, 7), torch.ones(2, 3)
    for turn in range(3):
        plain_step(model, optimizer, batch)
        plain_step(alone, single, batch)
        loss_of(model, batch).backward()
        if turn == 0:
            loss_of(alone, batch).backward()
            optimizer.step()
            single.step()
        optimizer.zero_grad()
        single.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_gradients_thrown_away_between_steps(hvd: ModuleType, settings: Callable[..., None]) -> None:
    """A layer that is not used keeps its bucket from being sent; its batch is dropped, and the next one uses it."""
    settings(overlap="thread")
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    for drop in ("none", "optimizer", "by hand"):
        if drop != "none":
            (second * 100.0).sum().backward()
            if drop == "optimizer":
                optimizer.zero_grad()
            else:
                second.grad = None
        optimizer.zero_grad()
        (first * (hvd.rank() + 1) + second * 2).sum().backward()
        optimizer.step()
    average = sum(r + 1 for r in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(first.detach(), torch.full((2,), 1 - 3 * average))
    torch.testing.assert_close(second.detach(), torch.full((2,), 1 - 3 * 2.0))


def test_newest_optimizer_over_a_model_wins(hvd: ModuleType, settings: Callable[..., None]) -> None:
    """As in a cell that is run again: the old optimizer is still there when the new one is made."""
    settings(overlap="thread")
    model = make_model()
    old = hvd.DistributedOptimizer(momentum(model))
    batch = torch.ones(2, 7), torch.ones(2, 3)
    plain_step(model, old, batch)
    new = hvd.DistributedOptimizer(momentum(model))
    for _ in range(3):
        plain_step(model, new, batch)
    again = hvd.DistributedOptimizer(new)
    plain_step(model, again, batch)
    assert type(again).__mro__[1:] == type(new).__mro__[1:]
    with pytest.raises(RuntimeError, match="newer DistributedOptimizer"):
        new.step()
    plain_step(model, old, batch)  # as torch's own, which may be of several for one model


def test_optimizers_leave_nothing_behind(hvd: ModuleType) -> None:
    model = make_model()
    batch = torch.ones(2, 7), torch.ones(2, 3)
    gone = []
    for _ in range(50):
        optimizer = hvd.DistributedOptimizer(momentum(model))
        plain_step(model, optimizer, batch)
        gone.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert not any(reference() for reference in gone)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_result_that_is_not_kept(hvd: ModuleType, size: int) -> None:
    """Each rank would train on its own gradients. Another optimizer may: a user wants it so."""
    model, batch = make_model(), (torch.ones(2, 7), torch.ones(2, 3))
    optimizer = momentum(model)
    kept = hvd.prepare(model, optimizer)
    plain_step(model, optimizer, batch)
    del kept
    optimizer = momentum(model)
    plain_step(model, optimizer, batch)
    hvd.prepare(model, optimizer)
    gc.collect()
    if size == 1:
        plain_step(model, optimizer, batch)
    else:
        with pytest.raises(RuntimeError, match=r"keep what prepare\(\) returns"):
            plain_step(model, optimizer, batch)
    plain_step(model, momentum(model), batch)


def test_needs_init(hvd: ModuleType) -> None:
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(momentum(make_model()))
    hvd.init()


def test_goes_on_in_another_generation(hvd: ModuleType) -> None:
    """As in a notebook: one cell builds the optimizer, the next ones train with it."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model))
    for _ in range(3):
        plain_step(model, optimizer, (torch.full((2, 7), float(hvd.rank())), torch.ones(2, 3)))
        hvd.shutdown()
        hvd.init()
    hvd.check(model, optimizer)


@pytest.mark.slow
def test_memory_is_flat_over_many_optimizers_and_generations(hvd: ModuleType) -> None:
    """A re-run cell builds its model and optimizer again, in a new generation."""

    def rounds(count: int) -> None:
        for number in range(count):
            model = nn.Linear(300, 300)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 300)).sum().backward()
                optimizer.step()
            if number % 5 < 2:
                hvd.shutdown()
                hvd.init()
        gc.collect()

    process = psutil.Process()
    rounds(20)
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    rounds(500 if hvd.size() == 2 else 50)
    after = process.memory_info().rss, process.num_fds(), process.num_threads()
    assert after[0] - before[0] < 16 << 20
    # A rank is watched by a descriptor of its own from the first time that it is waited for long.
    assert before[1] <= after[1] < before[1] + hvd.size()
    assert after[2] == before[2]


@pytest.mark.parametrize("turn", [0, 1])
def test_a_layer_left_out_on_one_rank_disturbs_nobody(
    hvd: ModuleType, settings: Callable[..., None], turn: int
) -> None:
    """Its bucket has to wait for ``step()`` there; collectives of the user, and another optimizer, come before that."""
    settings(overlap="thread", fusion_threshold=1)
    size, odd = hvd.size(), hvd.rank() == hvd.size() - 1
    layers = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    other = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, lr=1.0))
    second = hvd.DistributedOptimizer(torch.optim.SGD([other], lr=1.0))
    for step in range(4):
        optimizer.zero_grad()
        second.zero_grad()
        used = [w for number, w in enumerate(layers) if not (odd and step > 0 and number == (step + turn) % 4)]
        torch.stack(used[:: -1 if odd else 1]).sum().backward()
        other.sum().backward()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
        named = [hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=f"mine {n}") for n in range(3)[:: 1 - 2 * odd]]
        assert hvd.allgather(torch.ones(1)).shape == (size,)
        for one in (optimizer, second) if odd and step > 0 else (second, optimizer):  # the first step makes the plans
            one.step()
        assert all(hvd.synchronize(handle).tolist() == [size] * 3 for handle in named)
    for number, w in enumerate(layers):
        missed = sum((step + turn) % 4 == number for step in range(1, 4))
        torch.testing.assert_close(w.detach(), torch.full((2,), 1 - 4 + missed / size))
    torch.testing.assert_close(other.detach(), torch.full((2,), -3.0))
