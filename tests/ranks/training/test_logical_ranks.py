"""What logical ranks refuse, and what a loop sees of its turns. That bits are equal is tested in `tests/jobs`."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ring_notebook.torch as ring
from ring_notebook.core import metrics
from ring_notebook.errors import RingError
from ring_notebook.torch.training.turn_state import for_snapshot


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Other tests keep theirs."""
    yield
    torch.use_deterministic_algorithms(False)


def prepared(logical: int, **options: Any) -> Any:
    ring.init()
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.arange(48.0).reshape(24, 2)), batch_size=1)
    return ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, logical=logical, **options)


def test_fewer_than_there_are_ranks(size: int) -> None:
    if size == 1:
        pytest.skip("one rank is enough for every number")
    with pytest.raises(ValueError, match=rf"logical={size - 1} on {size} ranks: each rank carries at least one"):
        prepared(size - 1)


def test_options_that_do_not_go_with_them(size: int) -> None:
    for options, said in (
        ({"accumulate": 2}, "takes no accumulate; take more logical ranks"),
        ({"noise_scale": True}, "takes no noise_scale"),
        ({"strategy": "ddp"}, "takes no strategy"),
    ):
        with pytest.raises(TypeError, match=said):
            prepared(2 * size, **options)
    for options, said in (
        ({"op": ring.Sum}, "takes no op=Sum"),
        ({"op": ring.Adasum}, "takes no op=Adasum"),
        ({"sync_every": 5}, "takes no sync_every"),
        ({"backward_passes_per_step": 2}, "takes no backward_passes_per_step"),
        ({"compression": ring.Compression.fp16}, "takes no compression"),
    ):
        with pytest.raises(ValueError, match=said):
            prepared(2 * size, **options)
    for kind in (ring.SyncBatchNorm, nn.SyncBatchNorm):
        with pytest.raises(TypeError, match=r"takes no SyncBatchNorm \(module 1\).*BatchNorm1d"):
            ring.prepare(nn.Sequential(nn.Linear(2, 1), kind(1)), logical=2 * size)
    with pytest.raises(TypeError, match="logical must be an integer"):
        prepared(2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logical must be at least 1, got 0"):
        prepared(0)


def test_loops_that_cannot_take_turns(size: int) -> None:
    model, optimizer, loader = prepared(2 * size)
    with pytest.raises(RuntimeError, match=r"backward\(\) outside of a turn"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"a second step\(\) in one turn"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"backward\(\) after optimizer.step\(\) in one turn"):
            model(x).sum().backward()
        optimizer.zero_grad()
        break
    for (x,) in loader:
        with pytest.raises(RuntimeError, match=r"step\(closure\)"):
            optimizer.step(lambda x=x: model(x).sum())
        break


def test_turns(rank: int, size: int) -> None:
    model, optimizer, loader = prepared(2 * size)
    assert (ring.logical_rank(), ring.logical_size(), len(loader)) == (2 * rank, 2 * size, 24 // size)
    turns, norms, weights = [], [], []
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        turns.append(ring.logical_rank())
        weights.append(model.weight.detach().clone())
    assert turns == [2 * rank, 2 * rank + 1] * (12 // size)
    assert [norm > 0 for norm in norms] == [False, True] * (12 // size)
    first = torch.arange(48.0).reshape(24, 2)[: 2 * size].mean(0)
    assert torch.allclose(weights[1], weights[0] - 0.1 * first)
    assert ring.logical_rank() == 2 * rank


def test_rows_have_the_steps_of_each_logical_rank(rank: int, size: int) -> None:
    """Also where a loop over epochs is tracked, which has no steps of its own."""
    model, optimizer, loader = prepared(2 * size)
    metrics.begin()
    for _ in ring.track(range(2)):
        for (x,) in ring.track(loader):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ring.log(loss=1.0)
    steps: dict[float, list[float]] = {}
    for batch in metrics.drain("run", rank):
        number = 1 + batch.names.index("logical_rank")
        for _, *row in batch.rows():
            steps.setdefault(row[number], []).append(row[0])
    metrics.end()
    assert steps == {float(2 * rank + turn): [float(step) for step in range(24 // size)] for turn in range(2)}


def test_a_step_that_is_left_out(size: int) -> None:
    model, optimizer, loader = prepared(2 * size)
    before = model.weight.detach().clone()
    for (x,) in loader:
        model(x).sum().backward()
        if nn.utils.get_total_norm([p.grad for p in model.parameters()]) > 0:
            optimizer.zero_grad()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_backward_pass_that_has_raised(size: int) -> None:
    """And whose gradients the loop drops by itself, or by another optimizer, a copy."""
    model, optimizer, loader = prepared(2 * size)
    alone = copy.deepcopy(model)
    model, optimizer = pickle.loads(pickle.dumps(copy.deepcopy((model, optimizer))))
    for (x,) in loader:
        broken = model.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        broken.remove()
        model.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        model.zero_grad()
    its = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rows in torch.arange(48.0).reshape(24, 2).split(2 * size):
        its.zero_grad()
        (alone(rows).sum() / len(rows)).backward()
        its.step()
    torch.testing.assert_close(model.weight, alone.weight)


def test_a_loader_that_is_divided_already(size: int) -> None:
    ring.init()
    plain = ring.prepare(DataLoader(range(24)))
    with pytest.raises(ValueError, match="divides the data itself"):
        ring.prepare(plain, logical=2 * size)

    class Drawn:
        def __iter__(self) -> Any:
            return iter(range(24))

    with pytest.raises(TypeError, match="cannot divide what Drawn draws"):
        ring.prepare(DataLoader(range(24), sampler=Drawn()), logical=2 * size)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_number_of_logical_ranks(size: int, tmp_path: Path) -> None:
    ring.init()
    folder = Path(ring.broadcast_object(str(tmp_path / "checkpoints"), name="folder"))

    def saved(logical: int, name: str, **how: Any) -> Any:
        model = nn.Linear(2, 1)
        model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), logical=logical or None)
        return ring.checkpoint(model, optimizer, folder=folder / name, **how)

    with_turns, without = 2 * size, {"background": True}
    list(saved(with_turns, "turns").epochs(1))
    list(saved(0, "shards", **without).epochs(1))
    list(saved(0, "file").epochs(1))
    for name, logical, how, said in (
        (
            "turns",
            4 * size,
            {},
            rf"with {with_turns} logical ranks, this one has {4 * size} .*pass logical={with_turns}",
        ),
        ("turns", 0, without, rf"with {with_turns} logical ranks, this one has no logical ranks; pass"),
        ("shards", with_turns, {}, "with no logical ranks, this one has .*leave logical out"),
        ("file", with_turns, {}, "with no logical ranks, this one has .*leave logical out"),
    ):
        with pytest.raises(RingError, match=said):
            saved(logical, name, resume=True, **how)


def test_a_kernel_that_is_not_deterministic(size: int) -> None:
    model, _, loader = prepared(2 * size)
    for (x,) in loader:
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            model(x.clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))).sum().backward()
        break


def test_kernels_come_back_when_the_run_ends(size: int) -> None:
    """Threads and deterministic mode; a later run that trains on, without `prepare`, has them again."""

    def kernels() -> list[Any]:
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return [torch.get_num_threads(), mode, fill]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        before, within = kernels(), [1, (True, True), False]
        assert before != within
        _, _, loader = prepared(2 * size)
        assert kernels() == within
        ring.shutdown()
        assert kernels() == before
        ring.init()
        assert kernels() == before
        for _ in loader:
            assert kernels() == within
            break
        ring.shutdown()
        assert kernels() == before
    finally:
        torch.set_num_threads(threads)
    ring.init()


def test_memory_that_sums_take(size: int) -> None:
    """Besides a node of each level, and the leaf: one sum of these and the averages, as large as all gradients."""
    turns = 16
    model, optimizer, loader = prepared(turns * size)
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    layout = optimizer._reducer._flat_layout
    live = [optimizer._reducer._leaf.flats, *(value for _, _, value in optimizer._reducer._sum.nodes)]
    assert len([*layout._spare, *live]) <= 4 + 1 + 2


def test_snapshots_keep_logical_ranks_as_long_as_something_trains_as_them(size: int) -> None:
    """Else a cell after them, restored on more ranks, would draw the random numbers of rank 0 on the new ones."""
    gc.collect()  # of tests before
    made = list(prepared(2 * size))
    while made:
        assert for_snapshot() is not None
        made.pop(0)
        gc.collect()
    assert for_snapshot() is None
