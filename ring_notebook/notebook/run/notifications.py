"""The notices of a long run for a user who looks elsewhere: it has ended, failed, logged NaN or infinity, or is stuck.

They are shown in JupyterLab, through its own command and `ipylab`, and told to a callable.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from IPython.core.getipython import get_ipython

from ring_notebook.notebook import close_widgets
from ring_notebook.notebook.panel.headline import headline, text
from ring_notebook.notebook.panel.waits import stall_sentence, stuck
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RankView
from ring_notebook.text.error_text import error_text, printable
from ring_notebook.text.words import first_characters

AFTER = 60.0  # seconds; the user still watches a shorter run
_PERIOD = 1.0  # seconds between two looks for a standstill
_SECONDS_TO_TELL = 5.0  # for callables, when the kernel exits
_LONGEST_NAME = 200
_COMMAND = "apputils:notify"
_MOST = 140  # characters of a notification
_LAB = {"ok": "success", "failed": "error", "NaN": "warning", "stuck": "warning"}


@dataclass(frozen=True)
class Notice:
    """What has happened to a run: ``event`` is ``ok``, ``failed``, ``NaN`` or ``stuck``; `str` gives the text.

    ``run`` is the id of the run, ``directory`` holds its records. The text begins with the headline of its report.
    ``error`` says in one line why it has failed, or makes no progress.
    """

    event: str
    run: str
    name: str
    text: str
    directory: Path
    error: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass
class _Settings:
    tell: Callable[[Notice], Any] | None = None
    after: float = AFTER
    lab: bool = True


_settings = _Settings()
_telling: list[Thread] = []


def notify(tell: Callable[[Notice], Any] | None = None, *, after: float = AFTER, lab: bool = True) -> None:
    """Call ``tell(notice)`` when a run of this notebook ends, fails or is stuck, or when a metric is NaN or infinite.

    Only runs that have lasted ``after`` seconds give a notice; an interrupted one gives none. A run is stuck when no
    rank has made progress for as long, and for ``RING_STALL_WARNING``. What was set before is
    replaced, and None calls nothing. JupyterLab shows the same in its notification center, unless ``lab`` is False.
    ``tell`` is called in a thread of its own: the run does not wait for it, and an exception of it is printed as one
    line. Raises TypeError when it cannot be called, ValueError for a negative or NaN ``after``.
    """
    if tell is not None and not callable(tell):
        raise TypeError(f"expected a callable that takes a notice, got {type(tell).__name__}")
    if not after >= 0:  # not `<`: a NaN must fail too
        raise ValueError(f"after: expected seconds, 0 or more, got {after}")
    _settings.tell, _settings.after, _settings.lab = tell, after, lab


def described() -> str:
    """Who gets notices, and of which runs, in one line."""
    places = ["JupyterLab"] * (_settings.lab and _in_lab())
    places += [_name(_settings.tell)] if _settings.tell else []
    if not places:
        return "No run gives a notice."
    who = " and ".join(places)
    when = "it ends, fails, logs NaN or inf, or makes no progress"
    return f"A run of {_settings.after:g} s or more tells {who} when {when}."


class Notices:
    """The notices of one run, each at most once, or once for each standstill. They never change the run."""

    def __init__(self, log: RunRecord) -> None:
        self._log = log
        self._noticed_broken = self._noticed_stuck = False
        self._next = 0.0

    def look(self) -> None:
        """Give notice of NaN or infinity, and of a standstill; called repeatedly during the run."""
        with _contained(self._log.run):
            if not self._long():
                return
            if not self._noticed_broken and self._log.broken():
                self._noticed_broken = True
                self._give("NaN")
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _PERIOD
                self._look_for_standstill()

    def _look_for_standstill(self) -> None:
        stalled = stuck(self._log.view())
        if not stalled:
            self._noticed_stuck = False
        elif not self._noticed_stuck and min(rank.idle for rank in stalled) >= _settings.after:
            self._noticed_stuck = True
            self._give("stuck", stall_sentence(stalled, self._log.code_at), stalled)

    def end(self, error: str) -> None:
        """Give notice of the end of the run; ``error`` says why it failed."""
        with _contained(self._log.run):
            if self._log.status in ("ok", "failed") and self._long():
                self._give(self._log.status, error)

    def _long(self) -> bool:
        seconds = self._log.summary.get("seconds", self._log.now() - self._log.started)
        return bool(seconds >= _settings.after and (_settings.tell or _settings.lab))

    def _give(self, event: str, error: str = "", stalled: Sequence[RankView] = ()) -> None:
        log = self._log
        first, *more = text(headline(log, log.view(), stalled)).split("\n")
        message = "\n".join(dict.fromkeys([first, *filter(None, [error]), *more]))
        notice = Notice(event, log.run, log.title, message, log.directory, error)
        for tell in filter(None, (_show_in_lab if _settings.lab else None, _settings.tell)):
            thread = Thread(target=_tell, args=(tell, notice), name=f"ring-notice-{log.run}", daemon=True)
            thread.start()
            _telling[:] = [*filter(Thread.is_alive, _telling), thread]


def _in_lab() -> bool:
    """Whether this process is the kernel of a front end that may be JupyterLab."""
    return hasattr(get_ipython(), "kernel") and find_spec("ipylab") is not None


def _show_in_lab(notice: Notice) -> None:
    # A notification has few characters: why it has failed comes before how large it was.
    show_in_lab(f"{notice.event} · {notice.name}\n{notice.error}" if notice.error else notice.text, _LAB[notice.event])


def show_in_lab(text: str, kind: str) -> None:
    """Show ``text`` until somebody dismisses it; ``kind`` is one of JupyterLab's, such as "warning".

    A front end that does not know the command ignores it.
    """
    if not _in_lab():
        return
    from ipylab import JupyterFrontEnd

    app: Any = JupyterFrontEnd()
    app.commands.execute(
        _COMMAND, {"message": first_characters(text, _MOST), "type": kind, "options": {"autoClose": False}}
    )
    close_widgets.close(app)


def _tell(tell: Callable[[Notice], Any], notice: Notice) -> None:
    with _contained(notice.run):
        try:
            tell(notice)
        except BaseException as error:
            _say(notice.run, f"{_name(tell)} raised {type(error).__name__}: {error_text(error)}")


@contextmanager
def _contained(run: str) -> Iterator[None]:
    """Print any exception of the block as one line, for example that no thread can be started."""
    try:
        yield
    except Exception as error:
        _say(run, f"it could not be given: {type(error).__name__}: {error_text(error)}")


def _say(run: str, what: str) -> None:
    line = printable(what.partition("\n")[0])
    with suppress(OSError, ValueError):  # the reader has gone
        print(f"notice of run {run}: {line}", file=sys.stderr)  # noqa: T201


def _name(tell: Callable[[Notice], Any]) -> str:
    """The name of a callable, whose ``__name__`` may be anything."""
    try:
        return printable(str(tell.__name__), _LONGEST_NAME)
    except BaseException:
        return type(tell).__name__


@atexit.register
def _wait_for_callables() -> None:
    """Wait for the notice of the last cell when the kernel exits right after it, as in nbconvert."""
    deadline = time.monotonic() + _SECONDS_TO_TELL
    for thread in _telling:
        thread.join(max(0.0, deadline - time.monotonic()))
