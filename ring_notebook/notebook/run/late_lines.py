"""Prints below its cell what threads and children of a run write after it has ended."""

from __future__ import annotations

import sys
from contextvars import copy_context
from itertools import count
from threading import Event, Thread
from time import sleep
from typing import TYPE_CHECKING, Any

from ring_notebook.notebook.panel.labelled_lines import Line, Lines, text
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_view import Printed
from ring_notebook.notebook.run.takeover import FollowedLog

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

TITLE = "Written after run {} had ended:"

_SECONDS_TO_ASK = 1.0


def is_left(log: RunLog | FollowedLog) -> bool:
    """Whether a rank has ended its part of the run, and threads or children of the cell still live."""
    return any(ended.summary.get("left") for ended in log.ended().values())


def follow(log: RunLog | FollowedLog, engines: Engines, ended: Event) -> None:
    """Print what comes when the run has ``ended``, until nothing more can come; returns at once.

    The kernel shows what a thread prints below the cell whose context it has; ipykernel 6 gives it to each thread.
    """
    context = copy_context()
    Thread(target=context.run, args=(_follow, log, engines, ended), name="ring-late-lines", daemon=True).start()


def _follow(log: RunLog | FollowedLog, engines: Engines, ended: Event) -> None:
    ended.wait()
    lines, numbers = Lines(), count(1)
    more = is_left(log)
    told = False
    while more:
        sleep(_SECONDS_TO_ASK)
        try:
            answers: list[Any] = engines.call_beside("ring_notebook.engine.late_output:take", log.run)
        except Exception:  # the cluster has ended
            return
        # On a silent rank native code holds the interpreter: it answers later.
        more = any(answer is None or answer[1] for answer in answers) and engines.known_to_controller()
        pieces = [
            Printed(next(numbers), rank, stream, written, False)
            for rank, answer in enumerate(answers)
            for stream, written in (answer[0] if answer else ())
        ]
        if new := lines.take(pieces, last=not more):
            if not told:
                print(TITLE.format(log.title))  # noqa: T201
                told = True
            _print(new)


def _print(lines: list[Line]) -> None:
    for line in lines:
        print(text([line]), end="", file=getattr(sys, line.stream), flush=True)
