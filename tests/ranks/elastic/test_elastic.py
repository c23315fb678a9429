"""Elastic training: commits, going back, samplers that go on, and starting again after a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ranks.joint_training import assert_same, joint_batches, make_model, momentum, plain_step, share
from ring_notebook.api.elastic_training import commit_path


def make_state(hvd: ModuleType, **kwargs: Any) -> Any:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model), named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, **kwargs)


def train_from(hvd: ModuleType, state: Any, steps: int) -> None:
    while state.batch < steps:
        plain_step(state.model, state.optimizer, share(joint_batches(hvd.size())[state.batch], hvd.rank()))
        state.batch += 1


def test_state_goes_back_to_what_was_saved(hvd: ModuleType) -> None:
    state, reference = make_state(hvd, seen=[1]), make_state(hvd)
    train_from(hvd, state, 4)
    state.seen.append(2)
    state.commit()
    train_from(hvd, state, 9)
    state.seen.append(3)
    state.restore()
    assert (state.batch, state.seen) == (4, [1, 2])
    state.seen.append(4)
    state.restore()
    assert state.seen == [1, 2]
    train_from(hvd, state, 7)
    train_from(hvd, reference, 7)
    assert_same(state.model, reference.model, rtol=0, atol=0)


def test_sync_takes_rank_0s_values(hvd: ModuleType) -> None:
    model = make_model(seed=hvd.rank())
    state = hvd.elastic.TorchState(model=model, optimizer=momentum(model), epoch=hvd.rank(), names=["a"] * hvd.rank())
    state.sync()
    assert (state.epoch, state.names) == (0, [])
    assert_same(model, make_model(seed=0), rtol=0, atol=0)
    state.epoch = 5
    state.restore()
    assert state.epoch == 0


def test_sampler_goes_on_with_what_is_left(hvd: ModuleType) -> None:
    size = hvd.size()
    data = list(range(10 * size))
    for shuffle in (False, True):
        sampler = hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=2)
        assert len(sampler) == 10
        before = list(sampler)[:4]
        sampler.record_batch(0, 2)
        sampler.record_batch(1, 2)
        saved = sampler.state_dict()
        again = hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=2)
        again.load_state_dict(saved)
        seen = hvd.allgather_object((before, list(again)))
        assert sorted(number for parts in seen for part in parts for number in part) == data
        assert len(again) == 6
        again.set_epoch(1)
        assert len(again) == 10
        orders = [again]
        other = list(orders[0])
        again.set_epoch(2)
        assert (list(again) == other) is not shuffle
    uneven = hvd.elastic.ElasticSampler(list(range(3 * size + 1)), shuffle=False)
    assert len(list(uneven)) == len(uneven) == 4
    one = hvd.elastic.ElasticSampler([7])
    assert list(one) == [0], "every rank gets a sample, however few are left"


def test_sampler_in_a_state(hvd: ModuleType) -> None:
    sampler = hvd.elastic.ElasticSampler(list(range(8 * hvd.size())))
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 3)
    state.commit()
    sampler.record_batch(1, 3)
    state.restore()
    assert len(sampler) == 5


def test_run_starts_again_from_the_last_commit(hvd: ModuleType) -> None:
    """One rank's collective fails in step 7; all go back to step 6, and end as if nothing had been."""
    state, reference = make_state(hvd), make_state(hvd)
    starts: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any, steps: int) -> str:
        starts.append(state.batch)
        while state.batch < steps:
            if state.batch == 7 and len(starts) == 1 and hvd.rank() == hvd.size() - 1:
                raise hvd.HorovodInternalError("a link went down")
            train_from(hvd, state, state.batch + 1)
            if state.batch % 3 == 0:
                state.commit()
        return "done"

    train_from(hvd, reference, 12)
    assert train(state, 12) == "done"
    assert starts == [0, 6]
    assert resets == [hvd.size()]
    assert_same(state.model, reference.model, rtol=0, atol=0)


def test_a_failure_on_one_rank_in_the_last_step_takes_the_others_back_too(hvd: ModuleType) -> None:
    starts: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        starts.append(state.batch)
        state.batch += 1
        state.commit()
        if len(starts) == 1 and hvd.rank() == hvd.size() - 1:
            raise hvd.HorovodInternalError("at the end")
        return int(state.batch)

    assert train(hvd.elastic.TorchState(batch=0)) == 2
    assert starts == [0, 1]


def test_run_gives_up_when_a_failure_comes_again_without_a_commit(hvd: ModuleType) -> None:
    starts: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        starts.append(1)
        raise hvd.HorovodInternalError("it always fails")

    with pytest.raises(hvd.HorovodInternalError, match="always"):
        train(hvd.elastic.TorchState(batch=0))
    assert len(starts) == 2


def test_run_keeps_the_state_when_hosts_change(hvd: ModuleType) -> None:
    starts: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        starts.append(state.batch)
        if len(starts) == 1:
            state.batch = 5
            if hvd.rank() == 0:
                state.on_hosts_updated()
            state.commit()
        return int(state.batch)

    assert train(hvd.elastic.TorchState(batch=0)) == 5
    assert starts == [0, 5]


def test_other_errors_are_raised_at_once(hvd: ModuleType) -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        train(hvd.elastic.TorchState(batch=0))


def test_commits_on_disk_outlive_the_process(
    hvd: ModuleType, settings: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    settings(commit_dir=folder)
    failure: BaseException | None = hvd.HorovodInternalError("the others are gone")

    @hvd.elastic.run
    def train(state: Any) -> int:
        begun = int(state.batch)
        train_from(hvd, state, 6)
        if state.commits == 0:
            state.commit()
        if failure is not None:
            raise failure
        train_from(hvd, state, 9)
        return begun

    with pytest.raises(hvd.HorovodInternalError):
        train(make_state(hvd))
    failure = None
    fresh, reference = make_state(hvd), make_state(hvd)
    assert train(fresh) == 6
    assert ("resuming from" in capsys.readouterr().out) is (hvd.rank() == 0)
    train_from(hvd, reference, 9)
    assert_same(fresh.model, reference.model, rtol=0, atol=0)
    assert train(make_state(hvd)) == 0, "a training that has ended leaves no commit"
    for failure in (OSError("no such file"), KeyboardInterrupt()):
        with pytest.raises(type(failure)):
            train(make_state(hvd))
    failure = None
    assert train(make_state(hvd)) == 6, "one that raised or was stopped does, on rank 0 as on others"


def test_a_changed_training_has_another_commit(
    hvd: ModuleType, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(commit_dir="commits")
    source = """
def train(state, momentum=0.9):
    lr, epochs = 1e-1, 1000
    def step(factor):
        return lr * 2.5 * factor
    return step(momentum) if state in {"a", "b", "c", "d"} else epochs
"""

    def place(text: str = source) -> Path | None:
        names: dict[str, Any] = {}
        exec(compile(text, "train.py", "exec"), names)
        return commit_path(names["train"])

    places = {place(), *(place(source.replace(old, "7")) for old in ("0.9", "1e-1", "1000", "2.5", '"c"'))}
    assert len(places) == 6
    assert place("# moved down" + source) == place()
    assert hvd.allgather_object(place()) == [place()] * hvd.size(), "whatever each process's order of a set"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--lr=0.2"])
    assert place() not in places


def test_sync_splits_what_is_left_of_an_epoch(hvd: ModuleType) -> None:
    """Also on the rank that the others take their values from, whose sampler has been under way."""
    sampler = hvd.elastic.ElasticSampler(range(40), shuffle=True)
    state = hvd.elastic.TorchState(sampler=sampler)
    used = hvd.allgather_object(list(sampler)[:3])
    sampler.record_batch(0, 3)
    state.sync()
    left = hvd.allgather_object(list(sampler))
    assert {sample for share in left for sample in share} == set(range(40)) - {s for share in used for s in share}
    assert len({len(share) for share in left}) == 1
    assert len(sampler) == len(left[0])


def test_a_state_of_ones_own(hvd: ModuleType) -> None:
    """Horovod's State: a subclass says how to save, restore and sync."""
    calls: list[str] = []

    class Own(hvd.elastic.State):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.batch = self.kept = 0

        def save(self) -> None:
            self.kept = self.batch

        def restore(self) -> None:
            calls.append("restore")
            self.batch = self.kept

        def sync(self) -> None:
            self.batch = hvd.broadcast_object(self.batch)
            self.save()

        def reset(self) -> None:
            calls.append("reset")

    @hvd.elastic.run
    def train(state: Any, steps: int) -> int:
        while state.batch < steps:
            state.batch += int(hvd.allreduce(torch.ones(1)).item())
            if state.batch == 5 and "restore" not in calls:
                raise hvd.HorovodInternalError("once")
            if state.batch % 2 == 0:
                state.commit()
        return int(state.batch)

    state = Own()
    state.register_reset_callbacks([lambda: calls.append("callback")])
    assert train(state, 7) == 7
    assert calls == ["restore", "reset", "callback"]
    assert state.commits == 3
    with pytest.raises(NotImplementedError):
        hvd.elastic.State().save()
