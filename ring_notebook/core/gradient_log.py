"""Marks (hashes) of the gradients of logical ranks: sent to the notebook, and compared with another run's.

It knows no framework. A script keeps no marks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ring_notebook.analysis.equal_gradients import Marks, difference_text, first_difference, marks_of
from ring_notebook.errors import ReplayDiffers
from ring_notebook.protocol.records import Gradients, decode

_Step = tuple[int, tuple[str, ...], Any]


class _GradientLog:
    """The marks of this process. The main thread notes them, another may drain."""

    def __init__(self) -> None:
        self._expected: Marks = {}
        self.end()

    def begin(self, run: str, rank: int, expected: bytes, until: int, stop: Callable[[], object]) -> None:
        """Begin a run of a notebook. ``expected``: messages with the marks of the run that it repeats.

        ``stop`` is called before the first batch of step ``until``, from 0.
        """
        self.end()
        self.is_on = True
        self._run, self._rank, self._until, self._stop = run, rank, until, stop
        self._expected = marks_of(one for one in decode(expected) if isinstance(one, Gradients))

    def end(self) -> None:
        """End the run; its marks may still be drained."""
        self.is_on = False
        self.steps = 0
        """Steps with gradients, including the present one."""
        self._round = -1
        self._until, self._stop = -1, bool
        self._expected = {}
        self._own: dict[str, list[int]] = {}  # of the present step
        self._rows: deque[_Step] = deque()

    @property
    def has_not_stopped(self) -> bool:
        """Whether the run has not reached the step before which it is to stop."""
        return self._until >= 0

    def before_batch(self) -> None:
        """Called before the loop gets the next batch of a logical rank."""
        if self.steps == self._until:
            self._until = -1
            self._stop()

    def note(self, round_: int, names: Sequence[str], sums: Any) -> None:
        """Note the sums of the gradients ``names``: integers, or a tensor of them on a device.

        Raises ReplayDiffers at the first step that differs from the repeated run's.
        """
        if round_ != self._round:
            self._round, self._own = round_, {}
            self.steps += 1
        step = self.steps - 1
        if self._expected:
            for name, mark in zip(names, _marks(sums), strict=True):
                self._own.setdefault(name, []).append(mark)
            known = {
                name: marks[: len(self._own.get(name, ()))] for name, marks in self._expected.get(step, {}).items()
            }
            if found := first_difference({step: known}, {step: self._own}):
                self._rows.append((step, tuple(names), sums))
                raise ReplayDiffers(
                    f"rank {self._rank}: {difference_text(*found)}. Training stopped here: `%ring debug` looks at it, "
                    f"`%ring runs replay RUN --until {step}` stops before this step"
                )
        self._rows.append((step, tuple(names), sums))

    def drain(self) -> list[Gradients]:
        """Take what was noted. Any thread may call it."""
        batches: list[Gradients] = []
        for _ in range(len(self._rows)):
            step, names, sums = self._rows.popleft()
            if not batches or batches[-1].names != names:
                batches.append(Gradients(self._run, self._rank, names, array("I")))
            batches[-1].values.extend((step, *_marks(sums)))
        return batches


def _marks(sums: Any) -> list[int]:
    """A hash of 32 bits for each sum; every bit of the sum affects it."""
    values = sums if isinstance(sums, list) else sums.tolist()
    return [(value * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 32 for value in values]


gradient_log = _GradientLog()
"""The marks of this process."""
