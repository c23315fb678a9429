"""An interrupt at any call within a step: all ranks have made the same steps, and train on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ring_notebook.torch as hvd
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted

Step = Callable[[], object]
_PRETENDED = "harness/devices"  # whose Python stands for a driver's C


def interrupted(call: Step, number: int, after: type[BaseException] | None) -> int:
    """Call ``call``, with SIGINT at this call or return in it, where Python handles signals; how many there were.

    ``after`` such an exception, it counts those while the exception is handled.
    """
    own, counting, seen = sys._getframe(), after is None, 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counting, seen
        counting = counting or isinstance(sys.exc_info()[1], after or ())
        if counting and frame is not own and event != "c_exception" and _PRETENDED not in frame.f_code.co_filename:
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGINT)

    error: BaseException | None = None
    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, CollectiveAborted) as raised:
        error = raised
    finally:
        sys.setprofile(None)
    if error is not None:
        world.fail(error)
        kept[:] = [error]
    return seen


kept: list[BaseException] = []  # its frames, as those of a cell's error are until the next cell
failing_call = 0  # of `loss_of`, on this rank


def loss_of(model: nn.Module) -> Tensor:
    global failing_call
    failing_call -= 1
    if failing_call == 0:
        raise ValueError("boom")
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(hvd.rank()), dtype=torch.float64)
    return nn.functional.mse_loss(model(x), x.cumsum(1)[:, ::2])


def lbfgs(model: nn.Module) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3))
    return optimizer, lambda: optimizer.step(closure_of(model, optimizer))


def lbfgs_under_ddp(model: nn.Module) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)

    def step() -> None:
        hvd.process_group()
        optimizer.step(closure_of(nn.parallel.DistributedDataParallel(model), optimizer))

    return optimizer, step


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    return optimizer, step


def tensors(values: Any) -> list[Tensor]:
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors(value)]
    return [] if values is None else [torch.as_tensor(values).detach().clone()]


def train_and_interrupt(make: Callable[..., Any], moments: Sequence[int], after: type[BaseException] | None) -> int:
    """Interrupt rank 1 at each of ``moments`` of a step, while rank 0 fails if ``after`` is set; the steps made."""
    global failing_call
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer, step = make(model)
    made: list[int] = []
    optimizer.register_step_post_hook(lambda *_: made.append(1))
    for number in moments:
        seen = 0
        kept.clear()
        if hvd.rank() == 1:
            seen = interrupted(step, number, after)
        else:
            failing_call = 2 if after is not None and hvd.rank() == 0 else 0
            try:
                step()
            except (ValueError, CollectiveAborted) as error:
                world.fail(error)
        failing_call = 0
        torch.set_grad_enabled(True)  # an engine puts it back after a cell
        with suppress(CollectiveAborted):
            hvd.shutdown()
        hvd.init()
        states = [value for entry in optimizer.state.values() for _, value in sorted(entry.items())]
        rows = hvd.allgather_object((len(made), tensors([*model.parameters(), *states]), seen < number))
        for rank, (steps, values, _) in enumerate(rows):
            assert steps == rows[0][0], f"moment {number}: steps made, by rank: {[row[0] for row in rows]}"
            assert len(values) == len(rows[0][1]), f"moment {number}: rank {rank} has another state"
            assert all(map(torch.equal, values, rows[0][1])), f"moment {number}: rank {rank} has other values"
        if rows[1][2]:
            break
    return len(made)


# One that comes in a finalizer or in a generator's end is lost, as in any Python program.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sizes(slow=(2, 3))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [None, CollectiveAborted], ids=["alone", "after another rank's failure"])
@pytest.mark.parametrize(
    ("make", "apart"), [(lbfgs, 7), (lbfgs_under_ddp, 67), (sgd, 7)], ids=["lbfgs", "lbfgs_under_ddp", "sgd"]
)
def test_an_interrupt_at_any_moment_of_a_step(
    make: Callable[..., Any], apart: int, after: type[BaseException] | None, hvd: ModuleType
) -> None:
    """Also while a group of torch.distributed is made."""
    train_and_interrupt(make, range(1, 100_000, apart), after)


@pytest.mark.sizes(3)
def test_an_interrupt_while_a_failed_step_is_undone(hvd: ModuleType) -> None:
    train_and_interrupt(lbfgs, range(40, 120, 4), CollectiveAborted)


class CountingLBFGS(torch.optim.LBFGS):
    """Keeps a number among its options, as D-Adaptation does."""

    def step(self, closure: Callable[[], Any]) -> Any:
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        return super().step(closure)


@pytest.mark.sizes(2)
def test_a_failed_step_leaves_the_options_as_they_were(hvd: ModuleType) -> None:
    global failing_call
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(CountingLBFGS(model.parameters(), lr=0.1, max_iter=2))
    optimizer.step(closure_of(model, optimizer))
    failing_call = 2 if hvd.rank() == 0 else 0  # in the middle of the step
    with pytest.raises((ValueError, CollectiveAborted)) as failed:
        optimizer.step(closure_of(model, optimizer))
    failing_call = 0
    world.fail(failed.value)
    assert optimizer.param_groups[0]["calls"] == 1
    with suppress(CollectiveAborted):
        hvd.shutdown()
    hvd.init()
    optimizer.step(closure_of(model, optimizer))
    assert optimizer.param_groups[0]["calls"] == 2
