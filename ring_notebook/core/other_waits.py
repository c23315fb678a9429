"""Waits of a rank outside of our collectives: for messages of other ranks, in groups of other backends, and for data.

The panel shows them, and the timeline draws them. Only the main thread counts, because it executes the run.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import monotonic_ns
from typing import NamedTuple

from ring_notebook.errors import CollectiveError
from ring_notebook.text.words import GATES

KEPT = 1 << 14
"""The newest waits that are recorded."""


class Wait(NamedTuple):
    """A part of the time of this rank, in nanoseconds of the monotonic clock.

    ``phase`` is "bubble" while it waits for a message, "waiting" in a collective of another backend, "moving" while a
    message arrives, and "data" while it waits for a batch.
    """

    begin: int
    end: int
    phase: str
    what: str


class Seconds(NamedTuple):
    """How long this rank has waited since its run began."""

    messages: float
    """For messages over our core; `world.waiting` includes these."""
    foreign: float
    """In operations of other backends."""
    foreign_messages: float
    """The part of `foreign` in messages."""


class _Counters:
    """The counters of this process. The main thread writes, any thread may read."""

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
    """Until the run ends, record the waits for `take`: the newest few thousand."""
    _counters.kept = deque(maxlen=KEPT)


def take() -> list[Wait]:
    """Take the waits recorded since the last call."""
    kept = list(_counters.kept or ())
    if _counters.kept:
        _counters.kept.clear()
    return kept


def seconds() -> Seconds:
    """The seconds counted so far. Any thread may call it."""
    return _counters.seconds


def now() -> tuple[str, float] | None:
    """What the main thread waits for now, and since how many seconds; None if it does not wait. For any thread."""
    current = _counters.now
    return None if current is None else (current[0](), (monotonic_ns() - current[1]) * 1e-9)


def message(wait: Callable[[], float], what: Callable[[], str]) -> None:
    """Call ``wait``, which waits for a message over our core and returns the seconds until the other side came."""
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


def data(began: int, ended: int) -> None:
    """The program has waited for a batch; `metrics` counts the seconds."""
    if _counters.kept is not None:
        _counters.kept.append(Wait(began, ended, "data", "waiting for data"))


def ours() -> None:
    """Cancel a `ForeignWait` around this call: the thread is about to wait for our core, which counts that itself."""
    foreign = _counters.foreign
    if foreign is not None and current_thread() is main_thread():
        foreign.withdraw()


class ForeignWait:
    """A context in which the main thread is in an operation of another backend. A nested one has no effect."""

    def __init__(self, what: str, is_message: bool = False) -> None:
        self._what = what
        self._is_message = is_message
        self._began = 0

    def __enter__(self) -> None:
        if _counters.now is None and current_thread() is main_thread():
            self._began = monotonic_ns()
            _counters.now, _counters.foreign = ((lambda: self._what), self._began), self

    def __exit__(self, *_: object) -> None:
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
        """End it now, without counting it."""
        _counters.now = _counters.foreign = None
        self._began = 0


@contextmanager
def own_words() -> Iterator[None]:
    """A context in which errors name operations of another runtime instead of the barriers before them."""
    names = "|".join(map(re.escape, GATES))
    try:
        yield
    except CollectiveError as error:
        text = re.sub(rf"(?:barrier|the name) '((?:{names})[^'\n]*)'", r"\1", str(error))
        raise type(error)(re.sub(rf" passed (?={names})", " called ", text)) from None
