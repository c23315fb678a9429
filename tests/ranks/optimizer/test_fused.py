"""The fused step equals the unfused one, shares its state with torch, and says what it cannot do."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ranks.joint_training import (
    Build,
    assert_same,
    assert_trains_alike,
    joint_batches,
    loss_of,
    make_model,
    momentum,
    plain_step,
    share,
)
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.rank.rank_status import rank_of_process

BUILDS: dict[str, Build] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "ascent": lambda model: torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5, maximize=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "groups": lambda model: torch.optim.Adam(
        [{"params": list(model.parameters())[:2], "lr": 0.001}, {"params": list(model.parameters())[2:]}], lr=0.01
    ),
}


def step_both(
    reference: nn.Module, alone: torch.optim.Optimizer, model: nn.Module, fused: torch.optim.Optimizer, batch: Any
) -> None:
    """A step of a single process on the joint batch, and one of the ranks on their shares of it."""
    plain_step(reference, alone, batch)
    plain_step(model, fused, share(batch, rank_of_process()))


@pytest.mark.parametrize("name", BUILDS)
def test_trains_as_a_single_process(hvd: ModuleType, name: str) -> None:
    assert_trains_alike(hvd, build=BUILDS[name], fused=True, rtol=1e-4, atol=1e-5)


def test_scheduler_changes_the_rate(hvd: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        plain_step(model, optimizer, batch)
        optimizer.param_groups[0]["lr"] *= 0.9

    assert_trains_alike(hvd, step, BUILDS["adam"], fused=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_state_travels_to_torch_and_back(hvd: ModuleType, name: str) -> None:
    """Ten fused steps, ten of torch's own with the fused state, ten fused ones again: thirty steps of one process."""
    batches = joint_batches(hvd.size(), 30)
    reference = make_model()
    alone = BUILDS[name](reference)
    for batch in batches:
        plain_step(reference, alone, batch)

    model = make_model()
    fused = hvd.DistributedOptimizer(BUILDS[name](model), fused=True)
    for batch in batches[:10]:
        plain_step(model, fused, share(batch, hvd.rank()))
    middle = copy.deepcopy(model)
    plain = BUILDS[name](middle)
    plain.load_state_dict(fused.state_dict())
    for batch in batches[10:20]:
        plain_step(middle, plain, batch)
    again = hvd.DistributedOptimizer(BUILDS[name](middle), fused=True)
    again.load_state_dict(plain.state_dict())
    for batch in batches[20:]:
        plain_step(middle, again, share(batch, hvd.rank()))
    assert_same(middle, reference, rtol=1e-4, atol=1e-5)


def test_wrapping_takes_over_the_state_of_the_wrapped_optimizer(hvd: ModuleType) -> None:
    batches = joint_batches(hvd.size())
    reference, model = make_model(), make_model()
    alone, optimizer = BUILDS["adamw"](reference), BUILDS["adamw"](model)
    for batch in batches[:10]:
        plain_step(reference, alone, batch)
        plain_step(model, optimizer, batch)
    fused = hvd.DistributedOptimizer(optimizer, fused=True)
    for batch in batches[10:]:
        step_both(reference, alone, model, fused, batch)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


def test_state_is_held_once(hvd: ModuleType) -> None:
    model = make_model()
    fused = hvd.DistributedOptimizer(BUILDS["adam"](model), fused=True)
    plain_step(model, fused, share(joint_batches(hvd.size())[0], hvd.rank()))
    held = sum(shard.numel() for flat in fused._flats for shard in flat.state)
    together = hvd.allreduce(torch.tensor(held), op=hvd.Sum).item()
    assert together == 2 * sum(flat.values.numel() for flat in fused._flats)


def test_different_learning_rates_are_an_error_on_every_rank(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank cannot disagree")
    model = make_model()
    fused = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1)), fused=True)
    with pytest.raises(CollectiveMismatch, match="learning rate"):
        plain_step(model, fused, share(joint_batches(hvd.size())[0], hvd.rank()))
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum)[0] == hvd.size()


def test_what_cannot_be_fused_is_said(hvd: ModuleType) -> None:
    model = make_model()
    parameters = list(model.parameters())
    for build, words in [
        (lambda: torch.optim.RMSprop(parameters), "supports SGD, Adam, AdamW, got RMSprop"),
        (lambda: torch.optim.Adam(parameters, amsgrad=True), "amsgrad"),
        (lambda: torch.optim.SGD([torch.zeros(3, dtype=torch.float64, requires_grad=True)]), "float32"),
    ]:
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(build(), fused=True)
    working = hvd.DistributedOptimizer(BUILDS["sgd"](model))
    for options in ({"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
        with pytest.raises(ValueError, match="compression"):
            hvd.DistributedOptimizer(BUILDS["sgd"](model), fused=True, **options)
    plain_step(model, working, share(joint_batches(hvd.size())[0], hvd.rank()))  # what was refused took nothing over
    model.zero_grad()
    fused = hvd.DistributedOptimizer(BUILDS["sgd"](model), fused=True)
    with pytest.raises(ValueError, match="has no gradient"):
        fused.step()


@pytest.mark.parametrize("restored", [False, True])
def test_goes_on_in_another_epoch_of_the_same_ranks(hvd: ModuleType, restored: bool) -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model), fused=True)
    batches = joint_batches(hvd.size())
    for batch in batches[:5]:
        plain_step(model, optimizer, share(batch, hvd.rank()))
    if restored:
        optimizer.load_state_dict(optimizer.state_dict())
    hvd.shutdown()
    hvd.init()
    for batch in batches[5:]:
        plain_step(model, optimizer, share(batch, hvd.rank()))
    alone = momentum(reference)
    for batch in batches:
        plain_step(reference, alone, batch)
    assert_same(model, reference)


def test_does_not_go_on_with_shares_that_do_not_fit(hvd: ModuleType) -> None:
    """Rank 0 has made a step more, as after an abort that came in the middle: that its share is new is said."""
    if hvd.size() == 1:
        pytest.skip("one rank holds all of the state")
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model), fused=True)
    batch = share(joint_batches(hvd.size())[0], hvd.rank())
    plain_step(model, optimizer, batch)
    saved = optimizer.state_dict()
    optimizer._flats[0].steps += hvd.rank() == 0
    hvd.shutdown()
    hvd.init()
    with pytest.raises(RuntimeError, match="each rank held a share of this optimizer's state"):
        plain_step(model, optimizer, batch)
    optimizer.load_state_dict(saved)
    plain_step(model, optimizer, batch)


def test_momentum_that_begins_in_the_middle(hvd: ModuleType) -> None:
    """OneCycleLR sets it; so may a user."""
    batches = joint_batches(hvd.size())
    reference, model = make_model(), make_model()
    alone, optimizer = (torch.optim.SGD(m.parameters(), lr=0.05, dampening=0.1) for m in (reference, model))
    fused = hvd.DistributedOptimizer(optimizer, fused=True)
    for number, batch in enumerate(batches):
        for one in (alone, fused):
            one.param_groups[0]["momentum"] = 0.9 if number % 10 > 4 else 0.0
        step_both(reference, alone, model, fused, batch)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


def test_state_survives_wrapping_again_and_cannot_be_copied(hvd: ModuleType) -> None:
    """A cell with ``DistributedOptimizer(optimizer, fused=True)`` is run again, on the result or on the original."""
    batches = joint_batches(hvd.size())
    reference, model = make_model(), make_model()
    alone, optimizer = BUILDS["adam"](reference), BUILDS["adam"](model)
    first = hvd.DistributedOptimizer(optimizer, fused=True)
    second, given = first, first
    for number, batch in enumerate(batches):
        if number in (5, 10):
            given = second if number == 5 else optimizer
            second = hvd.DistributedOptimizer(given, fused=number == 5)
        step_both(reference, alone, model, second, batch)
        if number < 10:
            with pytest.raises(RuntimeError, match="neither copied nor pickled"):
                copy.deepcopy(second)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="newer DistributedOptimizer"):
        first.step()


def test_a_group_is_added(hvd: ModuleType) -> None:
    batches = joint_batches(hvd.size())
    reference, model = make_model(), make_model()
    build = lambda m: torch.optim.Adam(m.first.parameters(), lr=0.01)  # noqa: E731
    alone, fused = build(reference), hvd.DistributedOptimizer(build(model), fused=True)
    with pytest.raises(ValueError, match="float32"):
        fused.add_param_group({"params": [torch.zeros(2, dtype=torch.float64, requires_grad=True)]})
    for number, batch in enumerate(batches):
        if number == 5:
            alone.add_param_group({"params": list(reference.second.parameters()), "lr": 0.002})
            fused.add_param_group({"params": list(model.second.parameters()), "lr": 0.002})
        reference.zero_grad(), model.zero_grad()
        step_both(reference, alone, model, fused, batch)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


def test_what_a_fused_step_has_instead(hvd: ModuleType) -> None:
    """Gradients add up until ``step()``; nothing can be done between their sum and the update."""
    model = make_model()
    fused = hvd.DistributedOptimizer(BUILDS["sgd"](model), fused=True, backward_passes_per_step=2)
    assert fused.backward_passes_per_step == 2
    with fused.no_sync():
        plain_step(model, fused, share(joint_batches(hvd.size())[0], hvd.rank()))
    for call in (fused.synchronize, fused.skip_synchronize):
        with pytest.raises(RuntimeError, match="to clip or unscale them leave fused out"):
            call()
    outside = hvd.add_process_set([0])
    alone = hvd.DistributedOptimizer(BUILDS["sgd"](make_model()), fused=True, process_set=outside)
    assert hvd.rank() == 0 or not hasattr(alone, "_flats")


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_and_closures_are_those_of_any_optimizer(hvd: ModuleType, fused: bool) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(BUILDS["momentum"](model), fused=fused)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    batch = joint_batches(hvd.size())[0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, share(batch, hvd.rank()))
        loss.backward()
        return loss

    torch.testing.assert_close(optimizer.step(closure), loss_of(make_model(), batch))
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("torchs", [False, True])
def test_grad_scaler(hvd: ModuleType, torchs: bool, unscaled: bool) -> None:
    """What a scaler has scaled gives the same step, and what has overflowed on one rank is a step of none.

    torch's own fused optimizers leave the scale to their step, too, and are wrapped like others.
    """
    reference, model = make_model(), make_model()
    build = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=torchs)  # noqa: E731
    alone, fused = build(reference), hvd.DistributedOptimizer(build(model), fused=True)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0 * (hvd.rank() + 1))
    for number, batch in enumerate(joint_batches(hvd.size(), 6)):
        fused.zero_grad()
        loss = loss_of(model, share(batch, hvd.rank()))
        overflow = number == 3
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 0 else loss).backward()
        if unscaled:
            scaler.unscale_(fused)
        scaler.step(fused)
        scaler.update()
        if not overflow:
            plain_step(reference, alone, batch)
        assert_same(model, reference, rtol=1e-4, atol=1e-5)


def test_nothing_is_updated_where_a_gradient_is_missing(hvd: ModuleType) -> None:
    model = make_model()
    groups = [{"params": layer.parameters()} for layer in (model.first, model.second)]
    fused = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), fused=True)
    model.first(torch.ones(2, 7)).sum().backward()
    with pytest.raises(ValueError, match="has no gradient"):
        fused.step()
    assert_same(model, make_model())


def test_a_parameter_without_elements(hvd: ModuleType) -> None:
    parameters = [nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3))]
    fused = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    fused.step()
    assert parameters[1].tolist() == [0.5] * 3


def test_a_step_that_did_not_happen_is_not_counted(hvd: ModuleType) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank cannot disagree")
    reference, model = make_model(), make_model()
    batches = joint_batches(hvd.size())
    alone, fused = BUILDS["adam"](reference), hvd.DistributedOptimizer(BUILDS["adam"](model), fused=True)
    for batch in batches:
        fused.param_groups[0]["lr"] = 0.1 * (hvd.rank() + 1)
        with pytest.raises(CollectiveMismatch):
            plain_step(model, fused, share(batch, hvd.rank()))
        fused.param_groups[0]["lr"] = alone.param_groups[0]["lr"]
        plain_step(model, fused, share(batch, hvd.rank()))
        plain_step(reference, alone, batch)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_a_mismatch_in_the_last_group_writes_no_group(hvd: ModuleType, option: str) -> None:
    """A retry with the right options is the first and only update of every group."""
    if hvd.size() == 1:
        pytest.skip("one rank cannot disagree")
    reference, model = make_model(), make_model()
    groups = lambda m: [{"params": m.first.parameters()}, {"params": m.second.parameters()}]  # noqa: E731
    build = lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9)  # noqa: E731
    alone, fused = build(reference), hvd.DistributedOptimizer(build(model), fused=True)
    for batch in joint_batches(hvd.size(), 6):
        before = copy.deepcopy(model)
        right = fused.param_groups[1][option]
        fused.param_groups[1][option] = right / (1 + hvd.rank())
        with pytest.raises(CollectiveMismatch) as mismatch:
            plain_step(model, fused, share(batch, hvd.rank()))
        assert_same(model, before, rtol=0, atol=0)
        assert f"parameter group 1: rank 0 has {option}={right}" in str(mismatch.value)
        fused.param_groups[1][option] = right
        step_both(reference, alone, model, fused, batch)
        assert_same(model, reference, rtol=1e-4, atol=1e-5)
