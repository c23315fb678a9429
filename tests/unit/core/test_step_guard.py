"""An interrupt waits for the end of an optimizer's step, and no longer than a second."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from weakref import proxy

import pytest

from ring_notebook.core.communicator import Communicator
from ring_notebook.core.native import core
from ring_notebook.core.step_guard import LONGEST_HOLD, StepGuard


@pytest.fixture
def alone() -> Iterator[Communicator]:
    ring_memory = core.RingMemory.create(0, 1, 64 << 20)
    communicator = Communicator(core.Communicator.open(ring_memory, [0], [0], 0, 1), ring_memory)
    yield proxy(communicator)  # tests keep what they are given until their file ends
    communicator.close()


@pytest.fixture
def guard() -> Iterator[StepGuard]:
    before = signal.getsignal(signal.SIGINT)
    yield StepGuard()
    signal.signal(signal.SIGINT, before)


class UserError(Exception):
    """What a user's own handler raises."""


@pytest.fixture(autouse=True)
def _says_nothing(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A step that ends in time is not reported as cut off."""
    yield
    assert "cut off" not in capsys.readouterr().err


def interrupt(guard: StepGuard, alone: Communicator, made: list[int]) -> None:
    """A step during which two signals arrive."""
    with guard.committed(alone):
        assert guard.held
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        made.append(1)


def test_an_interrupt_is_raised_behind_the_step(alone: Communicator, guard: StepGuard) -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt(guard, alone, made)
    assert made == [1]
    assert not guard.held
    with guard.committed(alone):  # one is raised once
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_step_that_takes_too_long_is_interrupted(
    alone: Communicator, guard: StepGuard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ring_notebook.core.world.is_initialized", lambda: True)
    monkeypatch.setattr("ring_notebook.core.world.current", lambda: SimpleNamespace(rank=3))
    begun = time.monotonic()

    def step() -> None:
        with guard.committed(alone):
            signal.raise_signal(signal.SIGINT)
            while True:
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert time.monotonic() - begun >= LONGEST_HOLD
    said = capsys.readouterr().err
    assert said.startswith("rank 3: the interrupt has cut off an optimizer step that took longer than 1 s: its weights")
    assert said.count("\n") == 1
    time.sleep(0.05)
    with guard.committed(alone):
        pass
    assert not capsys.readouterr().err


def test_an_interrupt_that_waited_does_not_strike_a_later_step(alone: Communicator, guard: StepGuard) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(guard, alone, [])
    end = time.monotonic() + 1.5 * LONGEST_HOLD
    while time.monotonic() < end:
        with guard.committed(alone):
            time.sleep(0.01)


def test_the_error_of_a_step_comes_with_the_interrupt(alone: Communicator, guard: StepGuard) -> None:
    def step() -> None:
        with guard.committed(alone):
            signal.raise_signal(signal.SIGINT)
            raise ValueError("a bug of the optimizer")

    with pytest.raises(KeyboardInterrupt) as caught:
        step()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_user_is_called_behind_the_step(alone: Communicator, guard: StepGuard) -> None:
    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        raise UserError

    signal.signal(signal.SIGINT, on_interrupt)
    made: list[int] = []
    with pytest.raises(UserError):
        interrupt(guard, alone, made)
    assert made == [1]


def test_a_step_that_has_raised_holds_nothing_back(alone: Communicator, guard: StepGuard) -> None:
    """The hooks of torch's own optimizers: the one behind the step is not called then."""

    def step() -> None:
        guard.begin(alone, sys._getframe())
        raise ValueError("a bug of the optimizer")

    with pytest.raises(ValueError, match="a bug"):
        step()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
