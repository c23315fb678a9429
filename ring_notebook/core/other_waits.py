"""What a rank waits for beside collectives of ours: messages of other ranks, and groups of other backends.

The panel shows both, and a recorded run draws them. Only the main thread counts: its time is what a run's is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import current_thread, main_thread
from time import monotonic_ns
from types import TracebackType
from typing import NamedTuple

_KEPT = 1 << 14


class Wait(NamedTuple):
    """A part of the time of this rank, in nanoseconds of the monotonic clock.

    ``phase`` is "bubble" where it waited for a message, "waiting" in a collective of another backend, and "moving"
    where a message was on its way.
    """

    begin: int
    end: int
    phase: str
    what: str


class Seconds(NamedTuple):
    """How long this rank has waited since its run began."""

    messages: float
    """For messages on our core; `world.waiting` has these too."""
    foreign: float
    """In operations of other backends."""
    foreign_messages: float
    """The part of them that were messages."""


class _Counters:
    """Of this process. The main thread writes, another may read."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds = Seconds(0.0, 0.0, 0.0)
        self.kept: deque[Wait] | None = None
        self.now: tuple[Callable[[], str], int] | None = None
        self.foreign: ForeignWait | None = None


_counters = _Counters()


def begin() -> None:
    """A run starts: count from 0, and keep no spans."""
    _counters.reset()


def keep() -> None:
    """Record what is waited for until the run ends, for `take`: the newest few thousand times."""
    _counters.kept = deque(maxlen=_KEPT)


def take() -> list[Wait]:
    """What has been recorded since the last call."""
    kept = list(_counters.kept or ())
    if _counters.kept:
        _counters.kept.clear()
    return kept


def seconds() -> Seconds:
    """What has been counted. Any thread may call it."""
    return _counters.seconds


def now() -> tuple[str, float] | None:
    """What the main thread waits for at this moment, and seconds since when; None when it does not. Any thread."""
    current = _counters.now
    return None if current is None else (current[0](), (monotonic_ns() - current[1]) * 1e-9)


def message(wait: Callable[[], float], what: Callable[[], str]) -> None:
    """Call ``wait``, which waits for a message on our core and returns the seconds before the other side had come."""
    if current_thread() is not main_thread():
        wait()
        return
    began = monotonic_ns()
    _counters.now = what, began
    try:
        waited = wait()
    finally:
        _counters.now = None
    ended, count = monotonic_ns(), _counters.seconds
    _counters.seconds = count._replace(messages=count.messages + waited)
    if _counters.kept is not None:
        came, title = min(ended, began + int(waited * 1e9)), what()
        _counters.kept += [Wait(began, came, "bubble", title), Wait(came, ended, "moving", title)]


def ours() -> None:
    """The calling thread is about to wait for our core, which counts that itself: a `ForeignWait` around it is none."""
    foreign = _counters.foreign
    if foreign is not None and current_thread() is main_thread():
        foreign.withdraw()


class ForeignWait:
    """The main thread is in an operation of another backend while this lasts. Within another one it is nothing."""

    def __init__(self, what: str, is_message: bool = False) -> None:
        self._what = what
        self._is_message = is_message
        self._began = 0

    def __enter__(self) -> None:
        if _counters.now is None and current_thread() is main_thread():
            self._began = monotonic_ns()
            _counters.now, _counters.foreign = ((lambda: self._what), self._began), self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        began = self._began
        if not began:
            return
        self.withdraw()
        ended, count = monotonic_ns(), _counters.seconds
        spent = (ended - began) * 1e-9
        _counters.seconds = count._replace(
            foreign=count.foreign + spent, foreign_messages=count.foreign_messages + spent * self._is_message
        )
        if _counters.kept is not None:
            _counters.kept.append(Wait(began, ended, "bubble" if self._is_message else "waiting", self._what))

    def withdraw(self) -> None:
        """It ends here, and counts for nothing."""
        _counters.now = _counters.foreign = None
        self._began = 0
