"""Local steps equal a single process that trains a copy of the model for each rank, whatever a run goes through."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ring_notebook.torch as ring
from ranks.joint_training import joint_batches, loss_of, make_model, momentum, plain_step, share
from ranks.optimizer.test_interrupts import interrupted
from ring_notebook.api.local_steps import LocalSteps, plan_fragments
from ring_notebook.core import metrics, world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch, RingError
from ring_notebook.torch.optimizer.averages import Average, Besides, ByteGroups, in_bytes
from ring_notebook.torch.optimizer.local_optimizer import LocalOptimizer

STEPS = 24
EVERY = 4
DILOCO = LocalSteps(EVERY, lr=0.7, momentum=0.9)


def make(hvd: ModuleType, model: nn.Module, settings: Any, **options: Any) -> LocalOptimizer:
    made: LocalOptimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), sync_every=settings, **options
    )
    assert isinstance(made, LocalOptimizer)
    return made


class Reference:
    """DiLoCo as its papers write it down, in one process: a copy of the model and of its optimizer for each rank.

    The outer optimizer is torch's own SGD. A fragment's average is taken when it is due, and used after the delay.
    """

    def __init__(self, size: int, settings: LocalSteps, model: nn.Module) -> None:
        self.settings = settings
        self.common = copy.deepcopy(model)
        self.copies = [copy.deepcopy(model) for _ in range(size)]
        self.optimizers = [momentum(one) for one in self.copies]
        nesterov = settings.momentum > 0
        self.outer = [
            torch.optim.SGD([one], lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
            for one in self.common.parameters()
        ]
        sizes = [one.numel() for one in model.parameters()]
        self.fragments = plan_fragments(sizes, settings.fragments)
        self.flying: list[tuple[int, int, Tensor]] = []  # step at which it lands, parameter, average
        self.steps = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.steps += 1
        for rank, (model, optimizer) in enumerate(zip(self.copies, self.optimizers, strict=True)):
            plain_step(model, optimizer, share(batch, rank))
        for landing in [one for one in self.flying if one[0] == self.steps]:
            self.flying.remove(landing)
            self.land(*landing[1:])
        for number, fragment in enumerate(self.fragments):
            offset = (number + 1) * self.settings.every // len(self.fragments) % self.settings.every
            if self.steps % self.settings.every == offset:
                self.take(fragment)

    def take(self, fragment: tuple[int, ...]) -> None:
        for index in fragment:
            common = list(self.common.parameters())[index].detach()
            differences = [common - list(one.parameters())[index].detach() for one in self.copies]
            average = torch.stack(differences).mean(0)
            if self.settings.delay:
                self.flying.append((self.steps + self.settings.delay, index, average))
            else:
                self.land(index, average)

    def land(self, index: int, average: Tensor) -> None:
        common = list(self.common.parameters())[index]
        common.grad = average
        self.outer[index].step()
        kept = self.settings.kept
        with torch.no_grad():
            for one in self.copies:
                own = list(one.parameters())[index]
                own.copy_(kept * own + (1 - kept) * common)


SETTINGS = {
    "local SGD": LocalSteps(EVERY, lr=1, momentum=0),
    "default": LocalSteps(EVERY),
    "DiLoCo": DILOCO,
    "in turn": LocalSteps(EVERY, lr=0.7, momentum=0.9, fragments=2),
    "streaming": LocalSteps(6, lr=0.7, momentum=0.9, fragments=3, delay=1),
    "late": LocalSteps(EVERY, delay=3, alpha=0.25),
}


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_a_single_process(hvd: ModuleType, name: str) -> None:
    settings = SETTINGS[name]
    model = make_model()
    reference = Reference(hvd.size(), settings, model)
    optimizer = make(hvd, model, settings)
    for batch in joint_batches(hvd.size(), STEPS):
        plain_step(model, optimizer, share(batch, hvd.rank()))
        reference.step(batch)
        for own, expected in zip(model.parameters(), reference.copies[hvd.rank()].parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
        for own, expected in zip(optimizer.common.values(), reference.common.parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert optimizer.ends_round
    optimizer.sync()
    hvd.check(model)
    assert_equal_on_ranks(hvd, list(model.parameters()))
    before = [one.clone() for one in model.parameters()]
    optimizer.sync()  # nothing has been stepped since: momentum moves nothing
    assert all(map(torch.equal, before, model.parameters()))


def assert_equal_on_ranks(hvd: ModuleType, tensors: list[Tensor]) -> None:
    rows = hvd.allgather_object([one.detach().clone() for one in tensors])
    for row in rows:
        assert all(map(torch.equal, row, rows[0]))


def train(hvd: ModuleType, model: nn.Module, optimizer: LocalOptimizer, first: int, last: int) -> None:
    for batch in joint_batches(hvd.size(), STEPS)[first:last]:
        plain_step(model, optimizer, share(batch, hvd.rank()))


def test_weights_differ_between_syncs_and_are_equal_behind_one(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, DILOCO)
    train(hvd, model, optimizer, 0, EVERY + 1)
    assert not optimizer.is_synced
    rows = hvd.allgather_object(next(model.parameters()).detach().clone())
    assert hvd.size() == 1 or not torch.equal(rows[0], rows[1])
    hvd.check(model, optimizer)  # compares what is to be equal
    optimizer.sync()
    assert optimizer.is_synced
    assert_equal_on_ranks(hvd, list(model.parameters()))


def test_nothing_is_sent_between_syncs(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, DILOCO)
    train(hvd, model, optimizer, 0, EVERY)
    before = hvd.counts()
    train(hvd, model, optimizer, EVERY, 2 * EVERY - 1)
    assert hvd.counts().operations == before.operations
    train(hvd, model, optimizer, 2 * EVERY - 1, 2 * EVERY)
    assert hvd.size() == 1 or hvd.counts().operations == before.operations + 2  # an allreduce and the commit


def test_horovods_calls_change_nothing(hvd: ModuleType) -> None:
    model, twin = make_model(), make_model()
    optimizer, other = make(hvd, model, DILOCO), make(hvd, twin, DILOCO)
    for batch in joint_batches(hvd.size(), EVERY):
        plain_step(model, optimizer, share(batch, hvd.rank()))
        other.zero_grad()
        loss_of(twin, share(batch, hvd.rank())).backward()
        other.synchronize()
        hvd.clip_grad_norm_(twin.parameters(), 1e9)
        with other.skip_synchronize():
            other.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_ranks_that_begin_differently_are_made_equal(hvd: ModuleType) -> None:
    model = make_model(seed=hvd.rank())
    optimizer = make(hvd, model, LocalSteps(EVERY))
    train(hvd, model, optimizer, 0, EVERY)
    assert_equal_on_ranks(hvd, list(model.parameters()))


@pytest.mark.sizes(3, slow=(2,))
def test_ranks_with_other_settings_are_told(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, LocalSteps(EVERY + (hvd.rank() == 1)))
    with pytest.raises(CollectiveMismatch, match=f"every={EVERY + 1}.* on rank 1; make the optimizer with the same"):
        train(hvd, model, optimizer, 0, 1)


def test_a_scaler_leaves_out_the_step_of_one_rank(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, DILOCO)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, batch in enumerate(joint_batches(hvd.size(), EVERY)):
        optimizer.zero_grad()
        before = [one.detach().clone() for one in model.parameters()]
        loss = loss_of(model, share(batch, hvd.rank()))
        overflows = number == 1 and hvd.rank() == 0
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, model.parameters())) == overflows
    assert optimizer.is_synced
    assert_equal_on_ranks(hvd, list(model.parameters()))


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, ring.clip_grad_norm_], ids=["torch's", "ours"])
def test_accumulated_batches_count_as_one_step(hvd: ModuleType, clip: Any) -> None:
    """What is clipped is their mean; a batch without step() is left out."""
    model, twin = make_model(), make_model()
    _, optimizer = hvd.prepare(model, momentum(model), sync_every=LocalSteps(2), accumulate=3)
    _, other = hvd.prepare(twin, momentum(twin), sync_every=2)

    def passed(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        clip(model.parameters(), 0.2)

    for batch in joint_batches(hvd.size(), 4):
        own = share(batch, hvd.rank())
        for rows in range(0, 6, 2):
            passed(model, optimizer, (own[0] * 9, own[1]))
            passed(model, optimizer, (own[0][rows : rows + 2], own[1][rows : rows + 2]))
            optimizer.step()
        passed(twin, other, own)
        other.step()
        for one, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)
    assert optimizer.is_synced


@pytest.mark.parametrize("settings", [LocalSteps(4), LocalSteps(4, fragments=2), LocalSteps(4, delay=2)], ids=str)
@pytest.mark.parametrize("change", [4, 6])
@pytest.mark.parametrize("kind", ["thawed", "exchanged", "added"])
def test_parameters_that_are_not_always_trained(hvd: ModuleType, settings: LocalSteps, change: int, kind: str) -> None:
    """Frozen and thawed, or given to the optimizer later: at a sync all ranks have the same of all of them."""
    model = make_model()
    optimizer = make(hvd, model.second if kind == "added" else model, settings)
    for step, batch in enumerate(joint_batches(hvd.size(), 11)):
        if kind != "added":
            model.first.requires_grad_(step >= change)
            model.second.requires_grad_(kind == "thawed" or step < change)
        elif step == change:
            optimizer.add_param_group({"params": list(model.first.parameters())})
        plain_step(model, optimizer, share(batch, hvd.rank()))
    optimizer.sync()
    assert_equal_on_ranks(hvd, list(model.parameters()))


def test_several_optimizers_and_a_closure(hvd: ModuleType) -> None:
    model = make_model()
    first = hvd.DistributedOptimizer(torch.optim.Adam(model.first.parameters(), lr=0.01), sync_every=3)
    second = hvd.DistributedOptimizer(torch.optim.LBFGS(model.second.parameters(), lr=0.1, max_iter=2), sync_every=2)
    for batch in joint_batches(hvd.size(), 6):
        own = share(batch, hvd.rank())

        def closure(own: tuple[Tensor, Tensor] = own) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, own)
            loss.backward()
            return loss

        second.step(closure)
        first.step()
    assert first.is_synced
    assert second.is_synced
    assert_equal_on_ranks(hvd, list(model.parameters()))


@pytest.mark.parametrize("name", ["DiLoCo", "streaming"])
def test_bytes_train_nearly_as_well(hvd: ModuleType, name: str) -> None:
    model, exact = make_model(), make_model()
    optimizer = make(hvd, model, SETTINGS[name], compression=hvd.Compression.int8)
    other = make(hvd, exact, SETTINGS[name])
    train(hvd, model, optimizer, 0, STEPS)
    train(hvd, exact, other, 0, STEPS)
    optimizer.sync()
    other.sync()
    assert_equal_on_ranks(hvd, list(model.parameters()))
    for one, expected in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0.05, atol=0.01)


def test_rounding_to_bytes_does_not_add_up(hvd: ModuleType) -> None:
    """With error feedback all that was averaged is nearer to the truth than two roundings, after any number."""
    size = hvd.size()
    groups = ByteGroups.of(world.current().communicator)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, size, 3001, generator=generator)
    truth, got = torch.zeros(3001), torch.zeros(3001)
    besides = Besides()
    for row in rows:
        given = [row[hvd.rank()][:1000].view(10, 100), row[hvd.rank()][1000:]]
        steps = in_bytes(given, groups, hvd.Compression.int8, besides, "averages", blocking=True)
        averages = Average(steps).finish()
        assert besides.nbytes == 3001 + 3 * 4
        assert [one.shape for one in averages] == [one.shape for one in given]
        got += torch.cat([one.flatten() for one in averages])
        truth += row.mean(0)
        largest = float(row.abs().max()) * 1.1  # with what an earlier rounding has left
        assert (got - truth).abs().max() <= 2 * largest / 254
    assert_equal_on_ranks(hvd, [got])


def test_other_compressors(hvd: ModuleType) -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        model = make_model()
        optimizer = make(hvd, model, DILOCO, compression=compression)
        train(hvd, model, optimizer, 0, 2 * EVERY)
        assert_equal_on_ranks(hvd, list(model.parameters()))


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_state_dict_of_a_round_continues_bit_by_bit(hvd: ModuleType, compression: str) -> None:
    kind = getattr(hvd.Compression, compression)
    model = make_model()
    optimizer = make(hvd, model, DILOCO, compression=kind)
    train(hvd, model, optimizer, 0, EVERY + 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(hvd, model, optimizer, EVERY + 2, STEPS)
    other = make_model(seed=7)
    restored = make(hvd, other, DILOCO, compression=kind)
    other.load_state_dict(weights)
    restored.load_state_dict(state)
    train(hvd, other, restored, EVERY + 2, STEPS)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    momentum(other).load_state_dict(state)  # torch's own ignores what is ours


def test_a_checkpoint_waits_for_the_sync(hvd: ModuleType, tmp_path_factory: Any) -> None:
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("checkpoints")))
    model = make_model()
    _, optimizer = hvd.prepare(model, momentum(model), sync_every=EVERY)
    saved = hvd.checkpoint(model, optimizer, every="3 steps", folder=folder)
    equal = []
    for _ in saved.epochs(1):
        for batch in joint_batches(hvd.size(), EVERY + 2):
            plain_step(model, optimizer, share(batch, hvd.rank()))
            saved.step()
            equal.append(saved._written)
    if hvd.rank() == 0:
        assert equal == [-1, -1, -1, EVERY, EVERY, EVERY]  # due after 3 steps, written behind the sync
    assert_equal_on_ranks(hvd, list(model.parameters()))
    other = make_model(seed=3)
    _, restored = hvd.prepare(other, momentum(other), sync_every=EVERY)
    hvd.checkpoint(other, restored, folder=folder, resume=True)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(map(torch.equal, optimizer.common.values(), restored.common.values()))


def test_prepare_ends_the_round(hvd: ModuleType) -> None:
    model = make_model()
    own = momentum(model)
    _, optimizer = hvd.prepare(model, own, sync_every=LocalSteps(EVERY, lr=1, momentum=0))
    train(hvd, model, optimizer, 0, 2)
    rows = hvd.allgather_object([one.detach().clone() for one in model.parameters()])
    _, optimizer = hvd.prepare(model, own, sync_every=LocalSteps(EVERY, lr=1, momentum=0))
    for one, *of_ranks in zip(model.parameters(), *rows, strict=True):
        torch.testing.assert_close(one.detach(), torch.stack(of_ranks).mean(0), rtol=1e-5, atol=1e-6)
    train(hvd, model, optimizer, 2, 2 + EVERY)
    assert optimizer.is_synced
    _, every_step = hvd.prepare(model, own)
    assert not isinstance(every_step, LocalOptimizer)


@pytest.mark.sizes(3, slow=(2,))
def test_a_rank_that_comes_late_takes_the_common_weights(hvd: ModuleType) -> None:
    model = make_model()
    own = momentum(model)
    _, optimizer = hvd.prepare(model, own, sync_every=DILOCO)
    train(hvd, model, optimizer, 0, EVERY + 2)
    common = {name: one.clone() for name, one in zip("abcd", optimizer.common.values(), strict=True)}
    momenta = [one.clone() for one in optimizer.state_dict()["outer"]["momentum"].values()]
    fail_and_begin_anew(hvd)
    if hvd.rank() == 1:  # as a rank that was started again
        model = make_model(seed=9)
        own = momentum(model)
    _, optimizer = hvd.prepare(model, own, sync_every=DILOCO)
    assert all(map(torch.equal, common.values(), model.parameters()))
    kept = optimizer.state_dict()["outer"]["momentum"].values()
    assert all(map(torch.equal, momenta, kept))
    train(hvd, model, optimizer, EVERY + 2, 2 * EVERY + 2)
    assert optimizer.is_synced
    assert_equal_on_ranks(hvd, list(model.parameters()))


@pytest.mark.sizes(3, slow=(2,))
def test_a_rank_that_comes_late_to_an_elastic_job(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, DILOCO)
    train(hvd, model, optimizer, 0, EVERY + 2)
    fail_and_begin_anew(hvd)  # all ranks of an elastic job do
    if hvd.rank() == 1:
        model = make_model(seed=9)
        optimizer = make(hvd, model, DILOCO)
    hvd.elastic.TorchState(model, optimizer).sync()
    train(hvd, model, optimizer, EVERY + 2, 2 * EVERY)
    assert optimizer.is_synced
    assert_equal_on_ranks(hvd, [*model.parameters(), *optimizer.common.values()])


def fail_and_begin_anew(hvd: ModuleType) -> None:
    world.fail(KeyboardInterrupt())
    with suppress(CollectiveAborted):
        hvd.shutdown()
    hvd.init()


@pytest.mark.sizes(3, slow=(2,))
@pytest.mark.parametrize("name", ["DiLoCo", "streaming"])
def test_ranks_that_were_interrupted_at_different_steps(hvd: ModuleType, name: str) -> None:
    """They go on from the step of the furthest, and lose nothing that they have learned."""
    settings = SETTINGS[name]
    model = make_model()
    optimizer = make(hvd, model, settings)
    own = [share(batch, hvd.rank()) for batch in joint_batches(hvd.size(), STEPS)]
    for batch in own[: settings.every + 1 + (hvd.rank() == 1)]:
        plain_step(model, optimizer, batch)
    before = [one.detach().clone() for one in model.parameters()]
    fail_and_begin_anew(hvd)
    plain_step(model, optimizer, own[-1])
    assert {*hvd.allgather_object(optimizer.state_dict()["outer"]["position"])} != {0}
    positions = hvd.allgather_object(optimizer.state_dict()["outer"]["position"])
    assert len(set(positions)) == 1
    moved = [float((a - b.detach()).norm()) for a, b in zip(before, model.parameters(), strict=True)]
    assert max(moved) < 1.0
    for batch in own[: settings.every - positions[0]]:
        plain_step(model, optimizer, batch)
    optimizer.sync()
    assert_equal_on_ranks(hvd, [*model.parameters(), *optimizer.common.values()])


# One that comes in a finalizer is lost, as in any Python program.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sizes(3, slow=(2,))
@pytest.mark.parametrize("moments", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["DiLoCo", "streaming", "bytes"])
def test_an_interrupt_at_a_random_moment_leaves_the_common_weights_equal(
    hvd: ModuleType, name: str, moments: int
) -> None:
    settings = SETTINGS["streaming" if name == "bytes" else name]
    compression = hvd.Compression.int8 if name == "bytes" else hvd.Compression.none
    model = make_model()
    optimizer = make(hvd, model, settings, compression=compression)
    batches = [share(batch, hvd.rank()) for batch in joint_batches(hvd.size(), settings.every + 1)]

    def some_rounds() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    calls = interrupted(some_rounds, 0, None)  # how many there are to choose from
    draw = random.Random(f"{name} {moments}")
    for _ in range(moments):
        number = draw.randrange(1, calls)
        if hvd.rank() == 1:
            interrupted(some_rounds, number, None)
        else:
            try:
                some_rounds()
            except RingError as error:
                world.fail(error)
        torch.set_grad_enabled(True)  # an engine puts it back after a cell
        with suppress(CollectiveAborted):
            hvd.shutdown()
        hvd.init()
        assert_equal_on_ranks(hvd, list(optimizer.common.values()))
        syncs = hvd.allgather_object(optimizer.state_dict()["outer"]["syncs"])
        assert len(set(syncs)) == 1, f"moment {number}: syncs made, by rank: {syncs}"
    some_rounds()
    optimizer.sync()
    assert_equal_on_ranks(hvd, list(model.parameters()))


def test_rows_say_how_far_ranks_are_apart_and_what_was_sent(hvd: ModuleType) -> None:
    model = make_model()
    optimizer = make(hvd, model, LocalSteps(EVERY, fragments=2, by_layer=True))
    metrics.begin()
    try:
        for batch in joint_batches(hvd.size(), EVERY):
            plain_step(model, optimizer, share(batch, hvd.rank()))
            hvd.log(loss=1.0)
        rows = [dict(zip(one.names, row[2:], strict=True)) for one in metrics.drain("", 0) for row in one.rows()]
    finally:
        metrics.end()
    layers = {name: value for name, value in rows[-1].items() if name.startswith("sync/distance of ")}
    assert [*rows[0]] == ["loss"]
    assert len(layers) == 4
    assert "sync/distance of second.bias" not in rows[1]
    assert rows[-1]["sync/distance"] == pytest.approx(sum(one * one for one in layers.values()) ** 0.5)
    apart = hvd.allgather_object(rows[-1]["sync/distance"])
    assert min(apart) > 0 or hvd.size() == 1
    if hvd.size() > 1:
        assert rows[-1]["sync/MB_every_step"] == pytest.approx(EVERY * 146 * 4e-6)
        assert rows[-1]["sync/MB"] == pytest.approx(146 * 4e-6)
