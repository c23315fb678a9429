"""How many collectives this rank had called when steps of a tracked loop began, for a comparison of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["MOST", "LoopCalls"]

MOST = 32  # steps of a loop that are noted


class _Loop:
    """One pass over a tracked loop: ``marks`` are the calls before some of its steps, the same ones on all ranks."""

    def __init__(self, name: str, line: int, calls: Callable[[], int]) -> None:
        self.name = name
        self.line = line
        self.marks: dict[int, int] = {}
        self._calls = calls
        self._every = 1

    def begin_step(self, step: int) -> None:
        """Step ``step``, counted from 0, begins."""
        if step % self._every:
            return
        marks = {**self.marks, step: self._calls()}
        if len(marks) > MOST:
            self._every *= 2
            marks = {at: calls for at, calls in marks.items() if at % self._every == 0}
        self.marks = marks  # at once: another thread reads it


class LoopCalls:
    """The loops of one run. ``calls`` says how many collectives this rank has called in it.

    ``lines`` are those of the cell that the main thread is at, the innermost first: ranks in the same pass over the
    same loop name it alike.
    """

    def __init__(self, calls: Callable[[], int], lines: Callable[[], Sequence[int]]) -> None:
        self._calls = calls
        self._lines = lines
        self._passes: Counter[str] = Counter()
        self._newest: _Loop | None = None
        self.number = 0  # of the pass, from 1; 0 outside of loops, and where steps are counted over all passes

    def begin(self, place: str, whole: bool = False) -> Callable[[int], None]:
        """A pass over the loop at ``place`` in its file begins; what this returns is called before each step.

        ``whole``: its steps are counted over all passes.
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
