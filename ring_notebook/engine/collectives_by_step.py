"""How many collectives a rank had called when steps of its loops began, which ranks compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MOST = 32  # steps of a loop that are recorded


class _Loop:
    """One pass over a tracked loop. ``marks``: the number of calls before some of its steps, the same on all ranks."""

    def __init__(self, name: str, line: int, calls: Callable[[], int]) -> None:
        self.name = name
        self.line = line
        self.marks: dict[int, int] = {}
        self._calls = calls
        self._every = 1

    def begin_step(self, step: int) -> None:
        """Note that step ``step``, counted from 0, begins."""
        if step % self._every:
            return
        marks = {**self.marks, step: self._calls()}
        if len(marks) > MOST:
            self._every *= 2
            marks = {at: calls for at, calls in marks.items() if at % self._every == 0}
        self.marks = marks  # in one assignment: another thread reads it


class LoopCalls:
    """The number of collectives that this rank had called when steps of a run's loops began, to compare the ranks.

    ``calls`` returns the number in the run so far. ``lines`` returns the lines of the cell that the main thread
    executes, the innermost first: ranks in the same pass over the same loop give it the same name.
    """

    def __init__(self, calls: Callable[[], int], lines: Callable[[], Sequence[int]]) -> None:
        self._calls = calls
        self._lines = lines
        self._passes: Counter[str] = Counter()
        self._newest: _Loop | None = None
        self.number = 0  # of the pass, from 1; 0 outside of loops, and where steps count over all passes

    def begin(self, place: str, whole: bool = False) -> Callable[[int], None]:
        """Begin a pass over the loop at ``place`` in its file. Returns a function to call before each step.

        ``whole``: steps count over all passes.
        """
        lines = self._lines()
        name = f"{place} {' '.join(map(str, lines))}"
        self._passes[name] += 1
        self.number = 0 if whole else self._passes[name]
        self._newest = _Loop(f"{name} {self._passes[name]}", lines[0] if lines else 0, self._calls)
        return self._newest.begin_step

    def report(self) -> dict[str, Any]:
        """The newest pass for a record: its ``name``, the ``line`` of the cell, and ``marks`` as (step, calls)."""
        newest = self._newest
        if newest is None:
            return {}
        return {"name": newest.name, "line": newest.line, "marks": [*newest.marks.items()]}
