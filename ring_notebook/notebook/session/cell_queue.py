"""Cells that wait for ranks which other runs use or a batch job will start, and the order in which they begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.run.run import Run
from ring_notebook.text.error_text import cause_text
from ring_notebook.text.words import ranks as rank_text

_PERIOD = 0.05
_ENDED = {"failed": "has failed", "interrupted": "was stopped"}
_SECONDS_TO_RETRY = 0.5  # to start a cell whose ranks cannot take it, such as dead ones


@dataclass(eq=False)
class QueuedCell:
    """A cell that waits for its ranks; ``%%ringtrain --background --out VAR`` assigns it to VAR until it begins.

    `wait` returns the run when that has ended; `cancel` takes the cell out of the queue.
    """

    name: str
    ranks: frozenset[int]
    first: bool = False
    """Whether it begins before all others, also while the queue is held, because it prepares ranks for them."""
    number: int = 0
    since: float = field(default_factory=time.time)
    behind: str = ""
    """What it waits for."""
    after: list[Run] = field(default_factory=list)
    """The runs that it has waited for."""
    run: Run | None = None
    error: BaseException | None = None
    """Why it has not begun."""
    cancelled: bool = False
    """Whether it was cancelled, or its waiting interrupted, before it began."""
    _left: Event = field(default_factory=Event)
    _cancelled: Event = field(default_factory=Event)

    def cancel(self) -> None:
        """Take the cell out of the queue; does nothing when it has begun."""
        self._cancelled.set()

    def wait(self) -> Run:
        """The run of the cell, when it has ended. Raises what `Run.wait` raises, and RingError when it was cancelled.

        An interrupt of this process before it has begun cancels it.
        """
        try:
            while not self._left.wait(_PERIOD):
                pass
        except KeyboardInterrupt:
            self.cancel()
            raise
        if self.run is None:
            raise self.error or RingError(f"cell {self.name} was cancelled before it began")
        return self.run.wait()

    @property
    def despite(self) -> str:
        """Which runs before it did not end well, as a sentence; empty if all did."""
        ends = [f"run {run.log.title}, which {_ENDED[run.status]}" for run in self.after if run.status in _ENDED]
        return f"Cell {self.name} runs after {' and '.join(ends)}." if ends else ""

    def __repr__(self) -> str:
        return f"<cell {self.name} on {rank_text(self.ranks)}: {self._state()}>"

    def _state(self) -> str:
        if self.run is not None:
            return f"has begun as run {self.run.log.title}"
        if self.cancelled:
            return "was cancelled before it began"
        if self.error is not None:
            return f"could not begin: {cause_text(self.error)}"
        return "has left the queue" if self._left.is_set() else f"waits for {self.behind}"


class CellQueue:
    """The cells that wait, in the order in which they came. ``in_progress`` gives the runs that use ranks now.

    A cell begins when no run uses one of its ranks and no cell before it waits for one. ``ranks_to_come`` says what
    will start the ranks, while there are none yet.
    """

    def __init__(self, in_progress: Callable[[], Sequence[Run]], ranks_to_come: Callable[[], str]) -> None:
        self._in_progress = in_progress
        self._ranks_to_come = ranks_to_come
        self._lock = Lock()
        self._cells: list[QueuedCell] = []
        self._holds = 0

    @property
    def cells(self) -> list[QueuedCell]:
        """Those that wait, the next one first."""
        return [cell for cell in self._cells if cell.behind]

    def enter(self, cell: QueuedCell) -> None:
        """Queue a cell; its ``behind`` is empty when nothing is before it. `begin` starts it, `leave` takes it out."""
        with self._lock:
            cell.number = max((one.number for one in self._cells), default=0) + 1
            cell.behind = self._before(cell)
            self._cells.append(cell)

    def leave(self, cell: QueuedCell) -> None:
        """Take a cell out, which has begun or will not; does nothing when it is out."""
        with suppress(ValueError):
            self._cells.remove(cell)
        cell._left.set()

    def begin(
        self,
        cell: QueuedCell,
        start: Callable[[], Run],
        wait: Callable[[], None],
        keeps_place: Callable[[], bool] = lambda: False,
    ) -> Run:
        """Call ``start`` when the turn of ``cell`` has come, and return its run; call ``wait`` often until then.

        When ``start`` raises ClusterError and ``keeps_place`` returns True, the cell stays and ``start`` is tried
        again. Raises RingError when the cell is cancelled.
        """
        again = 0.0
        try:
            while not cell._cancelled.is_set():
                with self._lock:
                    before = self._before(cell)
                    if not before and time.monotonic() >= again:
                        try:
                            cell.run = start()
                            return cell.run
                        except ClusterError as error:
                            if not keeps_place():
                                raise
                            before, again = str(error), time.monotonic() + _SECONDS_TO_RETRY
                    cell.behind = before or cell.behind
                wait()
                cell._cancelled.wait(_PERIOD)
            cell.cancelled = True
            raise RingError(f"cell {cell.name} was cancelled; it has not run")
        except BaseException as error:
            cell.cancelled |= isinstance(error, KeyboardInterrupt)
            if isinstance(error, RingError) and not hasattr(error, "_render_traceback_"):
                brief(error, f"{type(error).__name__}: {error}")  # `QueuedCell.wait` raises it elsewhere
            cell.error = error
            raise
        finally:
            self.leave(cell)

    def cancel(self, numbers: Sequence[int] = ()) -> list[QueuedCell]:
        """Cancel the cells with these numbers, by default all; returns them. Raises RingError for an unknown number."""
        waiting = {cell.number: cell for cell in self.cells}
        if missing := [str(number) for number in numbers if number not in waiting]:
            raise RingError(f"no cell {', '.join(missing)} waits in the queue; `%ring queue` lists them")
        chosen = [waiting[number] for number in numbers or waiting]
        for cell in chosen:
            cell.cancel()
        return chosen

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block no cell begins except those that are ``first``."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1

    def _before(self, cell: QueuedCell) -> str:
        """What ``cell`` waits for; empty when its turn has come."""
        if self._holds and not cell.first:
            return "ranks that are started again"
        if awaited := self._ranks_to_come():
            return awaited
        runs = [run for run in self._in_progress() if not run.ranks.isdisjoint(cell.ranks)]
        cell.after += [run for run in runs if run not in cell.after]
        earlier = self._cells[: self._cells.index(cell)] if cell in self._cells else self._cells
        cells = [] if cell.first else [one for one in earlier if not one.ranks.isdisjoint(cell.ranks)]
        return " and ".join([f"run {run.log.title}" for run in runs] + [f"cell {one.name}" for one in cells])
