"""Optimizer steps that all ranks make or none: the ranks commit to a step, and interrupts wait until its end."""

from __future__ import annotations

import signal
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from types import FrameType
from typing import Any

from ring_notebook.core import background_programs, world
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.steering import steering

COMMIT = "optimizer step"
"""The name of the operation in errors and timelines; prepared optimizers append a number."""
LONGEST_HOLD = 1.0
"""Most seconds for which an interrupt waits for a step."""

_main = threading.main_thread()


class StepGuard:
    """Delays interrupts (SIGINT) while ``held``.

    It wraps the present handler, Python's own or an engine's, from the first step of a generation to the generation's
    end. Python handles signals on its main thread only, so steps of other threads need no guard.
    """

    def __init__(self) -> None:
        self.held = False
        self._steps_at: FrameType | None = None  # the hold ends when this frame is left without a release
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._handler = self._on_signal
        self._pending = False  # a signal that waits for the step
        self._expired = False  # the signal has waited for LONGEST_HOLD, and was sent again
        self._steps = 0  # number of steps so far
        self.agreed = 0  # the newest change that all ranks had received at the last commit
        self._committed: Communicator | None = None  # of the present step, if all ranks of the world make it

    @contextmanager
    def committed(self, communicator: Communicator, name: str = COMMIT) -> Iterator[None]:
        """Commit with the ranks of ``communicator``, then delay interrupts while the block makes the step.

        Raises CollectiveMismatch if the ranks' ``name`` differs. If a rank does not commit, all ranks raise the errors
        of a collective, before the block begins.
        """
        set_aside = self._commit(communicator, name)
        try:
            yield
        except BaseException:
            self._committed = None  # the step has failed here
            raise
        finally:
            self.release(set_aside)

    def hold(self, frame: FrameType | None = None) -> None:
        """Delay interrupts, without a commit, until `release`, or until ``frame`` ends without one."""
        self._stand_before()
        self.held, self._steps_at = threading.current_thread() is _main, frame

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Delay interrupts within the block, without a commit."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def begin(self, communicator: Communicator, frame: FrameType, name: str = COMMIT) -> BaseException | None:
        """Commit, and delay interrupts until `release`, or until ``frame`` ends without one.

        Returns an exception for `release` to raise, or None.
        """
        set_aside = self._commit(communicator, name)
        self._steps_at = frame
        return set_aside

    def is_within(self, frame: FrameType) -> bool:
        """Whether ``frame`` is called from the step that `begin` or `hold` has begun."""
        return self.held and self._steps_at is not None and not self._is_left(frame)

    def release(self, set_aside: BaseException | None = None) -> None:
        """End the step: take the changes that all ranks have received, and end the hold.

        Raises the delayed interrupt, or ``set_aside``, if there is one. Waits while the run is paused.
        """
        committed, self._committed = self._committed, None
        if committed is not None:
            steering.passed(self.agreed)
        self.held, self._steps_at = False, None
        self._steps += 1
        pending, self._pending = self._pending, False
        if pending and self._before is not None:
            self._before(signal.SIGINT, sys._getframe())
        if set_aside is not None:
            raise set_aside
        if steering.is_paused and committed is not None:
            self._pause(committed)

    def alone(self) -> None:
        """End a step of the only rank: take received changes."""
        steering.passed(steering.newest)
        while steering.is_paused:
            steering.wait()
            steering.take(steering.newest)

    def _pause(self, communicator: Communicator) -> None:
        """Wait for the end of the pause, and take what has been changed meanwhile, on all ranks or on none."""
        while steering.is_paused:
            steering.wait()
            set_aside = self._commit(communicator)
            self._committed = None
            steering.take(self.agreed)
            self.release(set_aside)

    def _commit(self, communicator: Communicator, name: str = COMMIT) -> BaseException | None:
        self._committed = None
        if threading.current_thread() is not _main:  # only the main thread takes changes
            return communicator.commit(name=name)
        self._stand_before()
        self.held, self._steps_at = False, None  # an earlier step may have raised
        self.agreed = 0
        set_aside = communicator.commit(self, name=name, newest=steering.newest)
        if world.spans(communicator):
            self._committed = communicator
        return set_aside

    def _stand_before(self) -> None:
        if threading.current_thread() is not _main:
            return
        handler = signal.getsignal(signal.SIGINT)
        if handler is not self._handler and callable(handler):
            self._before = handler
            signal.signal(signal.SIGINT, self._handler)
            world.at_close(self._stand_down)

    def _stand_down(self) -> None:
        if threading.current_thread() is _main and signal.getsignal(signal.SIGINT) is self._handler:
            self.held = self._pending = False
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        assert self._before is not None
        expired, self._expired = self._expired, False
        if expired and not self._pending:  # meanwhile the step has ended and raised the interrupt
            return
        if self.held and not expired and not self._is_left(frame):
            if not self._pending:
                self._pending = True
                # Not through threading, whose lock this thread may hold.
                start_new_thread(self._expire, (self._steps,))
            return
        if self.held and expired and not self._is_left(frame):
            _tell_cut_off()
        self.held, self._pending, self._steps_at = False, False, None
        self._before(number, frame)

    def _is_left(self, frame: FrameType | None) -> bool:
        """Whether the step has ended by an exception, without a release."""
        if self._steps_at is None:
            return False
        while frame is not None and frame is not self._steps_at:
            frame = frame.f_back
        return frame is None

    def _expire(self, step: int) -> None:
        sleep(LONGEST_HOLD)
        if self._pending and self._steps == step:
            self._expired = True
            signal.pthread_kill(_main.ident or 0, signal.SIGINT)


def _tell_cut_off() -> None:
    who = f"rank {world.current().rank}: " if world.is_initialized() else ""
    with suppress(RuntimeError, OSError, ValueError):  # within a write to this stream, or it is closed
        sys.stderr.write(
            f"{who}the interrupt has cut off an optimizer step that took longer than {LONGEST_HOLD:g} s: its weights "
            "may be changed in part; continue from a checkpoint or a snapshot\n"
        )


step_guard = StepGuard()
"""The guard of this process, which has one main thread."""


def step() -> None:
    """The end of a step that no prepared optimizer makes: ranks take changes of knobs here, and wait while paused.

    For loops that reduce by `allreduce` and update parameters themselves, for steps of compiled graphs, and for
    optimizers on a part of the ranks. All ranks of the run call it equally often; it costs as much as an `allreduce` of
    one number. Beyond Horovod. Raises NotInitializedError before ``init()``, and the errors of a collective.
    """
    background_programs.settle()
    communicator = world.current().communicator
    if communicator.size > 1:
        with step_guard.committed(communicator):
            pass
    elif world.spans(communicator):
        step_guard.alone()
