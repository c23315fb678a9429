"""Output of a cell's threads and children after its end: kept for its notebook, which shows it below that cell.

The notebook asks with `take`. The next cell shows output that was not asked for, marked as late.
"""

from __future__ import annotations

import threading
from time import monotonic
from weakref import WeakKeyDictionary

from ring_notebook.engine import descriptors
from ring_notebook.engine.descriptors import Stream
from ring_notebook.machine.process_life import has_children

_Written = list[tuple[Stream, str]]

_SECONDS_ASKED = 10.0  # after which a notebook counts as gone

_NO_RUN = ""
_OURS = "ring-"  # how the names of our own threads begin, which write nothing for a cell

_lock = threading.Lock()
_started_in: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()  # the run of each thread; none before runs
_asked: dict[str, float] = {}  # by run: when the notebook last asked for its output
_kept: dict[str, _Written] = {}  # of these runs
_last = _NO_RUN  # the last run that has ended, until the next one begins


def cell_begins() -> _Written:
    """Output since the last cell's end that no notebook asks for; without output of the engine's start."""
    global _last
    written = list(descriptors.take())
    descriptors.cell_begins()
    with _lock:
        if not _started_in:
            _started_in.update(dict.fromkeys(threading.enumerate(), _NO_RUN))
            return []
        last, _last = _last, _NO_RUN
        if _is_asked(last):
            _kept[last] += written
            written = []
        lapsed = [run for run in _kept if not _is_asked(run)]
        return [*(piece for run in lapsed for piece in _kept.pop(run)), *written]


def cell_ends(run: str) -> None:
    """Remember ``run`` as the run of the threads that it leaves behind."""
    global _last
    with _lock:
        for thread in threading.enumerate():
            _started_in.setdefault(thread, _NO_RUN if thread.name.startswith(_OURS) else run)
        _last = run


def is_left_by(run: str) -> bool:
    """Whether threads of ``run`` live, or children of this process while no other run has begun."""
    living = threading.enumerate()
    with _lock:
        threads = any(_started_in.get(thread) == run for thread in living)
        return threads or (run == _last and has_children())


def add(stream: Stream, text: str) -> bool:
    """Keep what this thread prints, and return True, if its run has ended and a notebook asks for that."""
    run = _started_in.get(threading.current_thread(), _NO_RUN) if _asked else _NO_RUN
    if not run:
        return False
    with _lock:
        if not _is_asked(run):
            return False
        _kept[run].append((stream, text))
        return True


def take(run: str) -> tuple[_Written, bool]:
    """What ``run`` has written since it ended and since the last call; and whether more may come."""
    more = is_left_by(run)  # first, so that its last output is taken below
    written = list(descriptors.take()) if run == _last else []
    with _lock:
        before = _kept.pop(run, [])
        if more:
            _asked[run], _kept[run] = monotonic(), []
        else:
            _asked.pop(run, None)
    return [*before, *written], more


def _is_asked(run: str) -> bool:
    if monotonic() - _asked.get(run, float("-inf")) < _SECONDS_ASKED:
        return True
    _asked.pop(run, None)
    return False
