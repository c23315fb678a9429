"""Makes one exception of the ranks' failures: of the original type, with one traceback, equal failures grouped."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Thread

from IPython.core.error import UsageError

from ring_notebook.errors import RunFailed
from ring_notebook.frameworks import default
from ring_notebook.notebook.panel.waits import count_calls
from ring_notebook.protocol.records import Failure
from ring_notebook.text import words
from ring_notebook.text.error_text import name_cells, printable

# IPython would show these itself: with frames of this package, or as if the cell had not failed.
_SHOWN_OTHERWISE = (SyntaxError, UsageError, SystemExit)
_SECONDS_TO_UNPICKLE = 2.0
STOPPED = " stopped because "
MISSING = re.compile(r"name '(\w+)' is not defined")
"""The message of a NameError."""
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def as_exception(failures: Sequence[Failure], text: str) -> BaseException:
    """The exception of the first failure; notebooks and plain Python show it with ``text``, which `describe` makes.

    ``failures`` must not be empty.
    """
    error = _original(primary(failures)[0])
    brief(error, text)
    error.__cause__ = RunFailed(f"\n{text}")
    return error


def brief(error: BaseException, text: str) -> BaseException:
    """Make IPython show ``text`` for ``error`` instead of a traceback through this package."""
    error._render_traceback_ = lambda: _highlighted(text)  # type: ignore[attr-defined]
    return error


def describe(
    failures: Sequence[Failure],
    still_running: Iterable[int] = (),
    calls: Mapping[int, int] | None = None,
    replaced: Mapping[int, float] | None = None,
    notebook: Container[str] = (),
) -> str:
    """One traceback into the cell, then a line for every group of ranks that ended in another way.

    ``still_running`` are ranks that did not stop although another one failed, ``calls`` how many collectives ranks have
    called. ``replaced`` says when ranks have lost what cells before had defined, in seconds since the epoch.
    ``notebook``: the names of the notebook's own variables.
    """
    first_to_fail = primary(failures)
    groups = grouped(first_to_fail)
    first, ranks = groups[0]
    lines = [name_cells(first.traceback.rstrip())]
    if len(ranks) > 1:
        lines.append(f"{words.ranks(ranks)}: same")
    elif len(failures) > 1 or not first.aborted:
        lines.append(f"raised on rank {first.rank}")
    for other, ranks in groups[1:]:
        same = _table(other) == _table(first) != ""
        lines.append(f"{words.ranks(ranks)}: {f'the same, at line {line_of(other)}' if same else _summary(other)}")
    lines += stopped(failure for failure in failures if failure not in first_to_fail)
    lines += [*_replaced(groups, replaced or {})] or [*_in_the_notebook(groups, notebook)]
    if first.aborted and len(set((calls or {}).values())) > 1:
        lines.append(f"{count_calls(calls or {})}; they part at line {line_of(first)}")
    lines += _traced(failures)
    return "\n".join([*lines, *_still_running(still_running)])


def in_a_line(failures: Sequence[Failure]) -> str:
    """What the first failure is, on which ranks, and where. ``failures`` must not be empty."""
    first, ranks = grouped(primary(failures))[0]
    place = f", line {line_of(first)}" if line_of(first) else ""
    text = _named(first.ename, _message(first)).split("\n")[0]
    return f"{text} ({words.ranks(ranks)}{place})"


def _message(failure: Failure) -> str:
    """The message of an exception; without one, as of an `assert`, the line that raised."""
    return failure.message or next((line for *_, line in reversed(failure.frames) if line), "")


def _named(name: str, text: str) -> str:
    return f"{name}: {text}" if text else name


def _replaced(groups: Iterable[tuple[Failure, list[int]]], when: Mapping[int, float]) -> Iterator[str]:
    """What to do on ranks that miss a name that others have, because they were replaced."""
    for failure, ranks in groups:
        if (failure.module, failure.ename) == ("builtins", "NameError") and when.keys() >= set(ranks):
            at = time.strftime("%H:%M:%S", time.localtime(max(when[rank] for rank in ranks)))
            were = "was" if len(ranks) == 1 else "were"
            yield f"{words.ranks(ranks)} {were} replaced at {at}: run the cells with your imports there again"


def _in_the_notebook(groups: Iterable[tuple[Failure, list[int]]], notebook: Container[str]) -> Iterator[str]:
    """What to do if ranks miss a variable that the notebook, or its environment, has."""
    for failure, _ in groups:
        key = failure.message.strip("'") if (failure.module, failure.ename) == ("builtins", "KeyError") else ""
        if key in os.environ and any("environ" in line for *_, line in failure.frames):
            own = f"{key} is set in the environment of the notebook, and ranks have the one in which they were started"
            yield f"{own}: `%ring restart` gives it to them"
        name = MISSING.match(failure.message) if (failure.module, failure.ename) == ("builtins", "NameError") else None
        if name is not None and name[1] == "ring":
            yield f"`import {default().face} as ring` in a `%%ringtrain` cell makes it"
        elif name is not None and name[1] in notebook:
            own = f"{name[1]} is a variable of the notebook, and ranks have their own"
            yield f"{own}: `%ring push {name[1]}` copies it to them, or make it in a `%%ringtrain` cell"


def stopped(failures: Iterable[Failure]) -> list[str]:
    """A line for each place where ranks have stopped because of others."""
    by_place: dict[str, list[int]] = {}
    for failure in failures:
        if failure.aborted:
            by_place.setdefault(where_stopped(failure), []).append(failure.rank)
    return [f"{words.ranks(ranks)}: {text}" for text, ranks in by_place.items()]


def _traced(failures: Sequence[Failure]) -> list[str]:
    """How to see what led to a failure of several ranks."""
    parted = any(failure.aborted or failure.ename == "CollectiveMismatch" for failure in failures)
    return ["`%ring trace` shows the last operations of all ranks"] if parted else []


def _still_running(ranks: Iterable[int]) -> list[str]:
    waiting = sorted(ranks)
    return [f"{words.ranks(waiting)}: still running; `%ring restart` ends it"] if waiting else []


def describe_deaths(stories: str, failures: Sequence[Failure], still_running: Iterable[int] = ()) -> str:
    """The ``stories`` of deaths, then a line for every group of ranks that failed or stopped because of them."""
    groups = grouped(own_failures(failures))
    lines = [f"{words.ranks(ranks)}: {_summary(failure)}" for failure, ranks in groups]
    return "\n".join([stories, *lines, *stopped(failures), *_traced(failures), *_still_running(still_running)])


def own_failures(failures: Iterable[Failure]) -> list[Failure]:
    """The failures of ranks that did not stop because another one failed."""
    return [failure for failure in failures if not failure.aborted]


def primary(failures: Sequence[Failure]) -> list[Failure]:
    """The failures of ranks that failed by themselves; all failures when there is none (a rank left early)."""
    return own_failures(failures) or list(failures)


def grouped(failures: Iterable[Failure]) -> list[tuple[Failure, list[int]]]:
    """One failure of each kind with the ranks that share it, in the order of their arrival."""
    groups: dict[tuple[object, ...], tuple[Failure, list[int]]] = {}
    for failure in failures:
        key = (failure.ename, failure.module, _table(failure) or failure.message, failure.frames)
        groups.setdefault(key, (failure, []))[1].append(failure.rank)
    return list(groups.values())


def _table(failure: Failure) -> str:
    """The table of calls of a mismatch, which every rank has; empty of other failures."""
    return failure.message.partition("\n")[2] if failure.ename == "CollectiveMismatch" else ""


def _summary(failure: Failure) -> str:
    return _named(f"{failure.ename} at line {line_of(failure)}", _message(failure))


def where_stopped(failure: Failure) -> str:
    """The message of a rank that stopped because of another one, without its own number: others may share it."""
    line = line_of(failure)
    text = failure.message.split("\n")[0].removeprefix(f"rank {failure.rank}: ")
    if not line and STOPPED in text:  # in the barrier that opens a run, which the user has not called
        return f"stopped before the first line because {text.partition(STOPPED)[2]}"
    return f"line {line}: {text}" if line else text


def line_of(failure: Failure) -> int:
    """The innermost line of the cell itself."""
    return next((line for file, line, _, _ in reversed(failure.frames) if file == "<cell>"), 0)


def _original(failure: Failure) -> BaseException:
    if failure.ename == "SystemExit":
        # A SystemExit would end a script, or look like the notebook's own exit.
        return RunFailed(f"rank {failure.rank} called sys.exit({failure.message})")
    if failure.pickled and (error := _unpickled(failure.pickled)):
        return error
    kind = getattr(builtins, failure.ename, None) if failure.module == "builtins" else None
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, _SHOWN_OTHERWISE):
        with suppress(TypeError):  # it takes other arguments, as UnicodeDecodeError does
            return kind(failure.message)
    like: type[RunFailed] = type(failure.ename, (RunFailed,), {"__module__": failure.module})
    return like(failure.message)


def _unpickled(pickled: str) -> BaseException | None:
    """The exception itself; None if its class, which a cell may define, cannot be unpickled or shown."""
    found: list[BaseException] = []

    def read() -> None:
        with suppress(BaseException):  # SystemExit and KeyboardInterrupt too
            error = pickle.loads(bytes.fromhex(pickled))
            text = str(error)
            brief(error, text)
            error.__cause__ = None
            if isinstance(error, BaseException) and printable(text) == text and not isinstance(error, _SHOWN_OTHERWISE):
                found.append(error)

    reader = Thread(target=read, name="ring-unpickle", daemon=True)
    reader.start()
    reader.join(_SECONDS_TO_UNPICKLE)
    return found[0] if found else None


def _highlighted(text: str) -> list[str]:
    return [
        f"{_RED}{line}{_PLAIN}" if line and not line.startswith((" ", "Traceback")) else line
        for line in text.split("\n")
    ]
