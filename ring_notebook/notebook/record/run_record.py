"""What is known of one run: what it is, its state at this moment, and its files on disk."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any, Literal, TypeVar, get_args

from ring_notebook.files.run_folders import RUN, SUMMARY
from ring_notebook.notebook.record.cell_constants import constants
from ring_notebook.notebook.record.displays import Displayed, bundles
from ring_notebook.notebook.record.logged_rows import Metrics
from ring_notebook.notebook.record.run_files import JOURNAL, Journal, read_json
from ring_notebook.notebook.record.run_view import Printed, RunState, RunView
from ring_notebook.notebook.record.tags_and_look import Labels, Look, keep_look, read_labels, read_look
from ring_notebook.protocol.records import (
    Change,
    Display,
    Ended,
    Failure,
    Gradients,
    Load,
    MetricBatch,
    Output,
    Record,
    Status,
)
from ring_notebook.text.words import first_characters

# Errors of reading the files of a run that somebody else has written or truncated.
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)

_MOST_RANKS = 1 << 20
_TITLE = 48  # characters
_LATEST = 1 << 35  # seconds since the epoch, in the year 3058

T = TypeVar("T", bound=Record)
RunStatus = Literal["running", "ok", "failed", "interrupted"]

_FIELDS: dict[str, Any] = {
    "run": str,
    "name": str,
    "size": int,
    "source": str,
    "options": dict,
    "environment": dict,
    "started": (int, float),
}


class RunRecord:
    """What is known of one run. `load` reads a run that has ended; a `RunLog` is the record of one in progress.

    ``options`` are those of the cell's magic, ``environment`` is what it runs on, ``started`` is in seconds
    since the epoch. ``summary`` is empty until the run has ended. ``trouble`` says why records cannot be read or
    written; it is empty while they can.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory = directory
        self.run: str = about["run"]
        self.name: str = about["name"]
        self.size: int = about["size"]
        self.source: str = about["source"]
        self.options: dict[str, Any] = about["options"]
        self.environment: dict[str, Any] = about["environment"]
        self.started: float = about["started"]
        self._began: float = time.monotonic() - max(0.0, time.time() - self.started)
        self.trouble = ""
        self.look = read_look(directory)
        try:
            self.summary = read_summary(directory)
        except ValueError as error:
            self.summary, self.trouble = {}, str(error)
        self.received = self.taken = 0  # messages from ranks that have arrived, and that have been written and applied
        self._state = RunState(self.size, self.started)
        self._newest = self.started  # when the newest record came
        self._changed = Condition()

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """The run whose files are in ``directory``.

        Raises FileNotFoundError when there is none, and ValueError when its files are not those of a run.
        """
        record = RunRecord(directory, read_about(directory))
        for journal in record._journals():
            record._read(journal)
        return record

    def _read(self, journal: Journal) -> None:
        for one, now in journal.records():
            try:
                self._apply(one, now)
            except ValueError:  # its rank is not one of the run
                journal.skipped += 1
        if journal.skipped:
            self.trouble = f"{journal.skipped} lines in {self.directory} are no records of a run and were skipped"

    def _apply(self, record: Record, now: float) -> None:
        with self._changed:
            self._state.apply(record, now)
            self._newest = now
            self._changed.notify_all()

    @property
    def status(self) -> RunStatus:
        """``running`` until the run has ended, then ``ok``, ``failed`` or ``interrupted``."""
        status: RunStatus = self.summary.get("status", "running")
        return status

    @property
    def title(self) -> str:
        """What a person calls the run: its name, else the first line of its cell that does something."""
        return self.name or first_line(self.source) or self.run

    @property
    def params(self) -> dict[str, Any]:
        """The hyper-parameters: constants of the cell, arguments of its optimizer and loader, and `ring.log_params`.

        Later ones replace earlier ones of the same name. A branch also has those of the run that it continues. Knobs
        have the values that were set before the first step.
        """
        with self._changed:
            set_first = self._state.begins_with
            return {**constants(self.source), **inherited(self.options), **self._state.params, **set_first}

    @property
    def own_params(self) -> dict[str, Any]:
        """The hyper-parameters without what a branch has inherited, and without values of knobs."""
        with self._changed:
            return {**constants(self.source), **self._state.params}

    @property
    def labels(self) -> Labels:
        """The tags and the note that somebody has given the run."""
        return read_labels(self.directory)

    @property
    def first_line(self) -> int:
        """The number that the notebook shows beside the first line of the source."""
        number = self.options.get("first_line", 1)
        return number if isinstance(number, int) else 1

    def code_at(self, line: int) -> str:
        """The text of a line of the cell, by its number in the notebook; empty if there is none."""
        listed, index = self.source.splitlines(), line - self.first_line
        return listed[index].strip() if 0 <= index < len(listed) else ""

    def keep_look(self, look: Look) -> None:
        """Take over how a reader wants to see the charts, and keep it with the run."""
        self.look = look
        with suppress(OSError):  # a full disk; the report of this notebook still has it
            keep_look(self.directory, look)

    def now(self) -> float:
        """Seconds since the epoch, without changes of the clock since this object was made."""
        return self.started + time.monotonic() - self._began

    def view(self) -> RunView:
        """The run at this moment (after its end: at its end), in bounded size."""
        now = self.started + self.summary["seconds"] if self.summary else self._shown_at()
        with self._changed:
            return self._state.view(now)

    def _shown_at(self) -> float:
        """The moment at which a run without a summary is shown: when its last rank ended, else now.

        No kernel may have been there when it ended.
        """
        return self._newest if len(self.ended()) == self.size else self.now()

    def metrics(self) -> Metrics:
        """Every row that was logged, from disk."""
        return Metrics(self._all(MetricBatch))

    def loads(self) -> Metrics:
        """Every reading of the ranks' machines, from disk, as rows of metrics whose step is whole seconds."""
        return Metrics(_row(load, self.started) for load in self._all(Load))

    def changes(self) -> Iterator[Change]:
        """Every change of knobs, from disk, as each rank took it."""
        return self._all(Change)

    def gradients(self) -> Iterator[Gradients]:
        """The marks of the gradients of logical ranks, from disk."""
        return self._all(Gradients)

    def changed(self) -> list[Change]:
        """Every change of knobs, from disk, each once, in the order in which the ranks took them."""
        seen: dict[int, Change] = {}
        for one in self.changes():
            seen.setdefault(one.number, one)
        return list(seen.values())

    def displays(self) -> list[Displayed]:
        """Everything that the ranks have displayed, from disk, in the order in which the notebook received it."""
        return bundles(self._all(Display))

    def media(self) -> list[Displayed]:
        """All images, figures, histograms and texts of `ring.log`, from disk, as `displays`."""
        return bundles(self._all(Display), of_log=True)

    def output(self) -> Iterator[Printed]:
        """Everything that the ranks have printed, from disk, in the order in which the notebook received it."""
        pieces = enumerate(self._all(Output), 1)
        return (Printed(at, one.rank, one.stream, one.text, one.block) for at, one in pieces)

    def _all(self, kind: type[T]) -> Iterator[T]:
        """Every record of a kind, from disk, in the order in which the notebook received them."""
        return (one for journal in self._journals() for one, _ in journal.records(kind.kind) if isinstance(one, kind))

    def _journals(self) -> Iterator[Journal]:
        yield Journal(self.directory / JOURNAL)
        if rest := self.summary.get("rest"):  # what the disk did not take
            yield Journal(Path(rest) / JOURNAL)

    def failures(self) -> list[Failure]:
        """The exceptions that ended ranks, in the order in which the notebook received them."""
        with self._changed:
            return list(self._state.failures)

    def broken(self) -> bool:
        """Whether a metric has had a value that is not finite."""
        with self._changed:
            return self._state.broken()

    def ended(self) -> dict[int, Ended]:
        """How each rank ended that has ended."""
        with self._changed:
            return self._state.ended()

    def statuses(self) -> dict[int, Status]:
        """The newest status of every rank that has sent one."""
        with self._changed:
            return self._state.statuses()

    def wait_ended(self, ranks: Iterable[int], timeout: float) -> bool:
        """Wait until ``ranks`` have ended; False when they have not after ``timeout`` seconds."""
        wanted = set(ranks)
        with self._changed:
            return self._changed.wait_for(lambda: wanted <= self._state.ended().keys(), timeout)


def _row(load: Load, started: float) -> MetricBatch:
    numbers = array("d", (load.time, int(load.time - started), *load.values.values()))
    return MetricBatch(load.run, load.rank, tuple(load.values), numbers)


def inherited(options: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a branch has from the run that it continues, by the ``options`` of its cell."""
    branch = options.get("branch")
    params = branch.get("params") if isinstance(branch, dict) else None
    return params if isinstance(params, dict) else {}


def first_line(source: str) -> str:
    """The first line of a cell that is no import, because imports tell no cells apart; else the first one."""
    lines = [line.strip().lstrip("# ") for line in source.splitlines()]
    lines = [line for line in lines if line and not line.startswith("%")]
    telling = (line for line in lines if not line.startswith(("import ", "from ")))
    return first_characters(next(telling, lines[0] if lines else ""), _TITLE)


def read_about(directory: Path) -> dict[str, Any]:
    """What the run in ``directory`` is: the content of its ``run.json``.

    Raises FileNotFoundError when there is none, and ValueError when it is truncated or describes no run.
    """
    about = read_json(directory / RUN)
    if not about:
        raise FileNotFoundError(f"no run in {directory}: {RUN} is not there")
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(about.get(name), kind)]
    if wrong:
        raise ValueError(f"{directory / RUN} describes no run: {', '.join(wrong)} missing or of another type")
    if not (0 < about["size"] <= _MOST_RANKS and 0 <= about["started"] < _LATEST):
        raise ValueError(f"{directory / RUN} describes no run: {about['size']} ranks at {about['started']} s")
    return about


def readable(directories: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folders of runs among these, each with its `read_about`; others and truncated ones are skipped."""
    for directory in directories:
        with suppress(*UNREADABLE):
            yield directory, read_about(directory)


def read_summary(directory: Path) -> dict[str, Any]:
    """How the run in ``directory`` ended; empty while it has not. Raises ValueError when its file is truncated."""
    summary = read_json(directory / SUMMARY)
    if summary and not (
        summary.get("status") in get_args(RunStatus)
        and isinstance(summary.get("seconds"), int | float)
        and isinstance(summary.get("samples_per_s", 0.0), int | float)
        and isinstance(ranks := summary.get("ranks", []), list)
        and all(isinstance(one, dict) and _are_numbers(one.get("last", {})) for one in (summary, *ranks))
        and isinstance(curve := summary.get("curve", {}), dict)
        and isinstance(values := curve.get("values", []), list)
        and all(isinstance(value, int | float) for value in values)
    ):
        raise ValueError(f"{directory / SUMMARY} is no summary of a run")
    return summary


def _are_numbers(last: Any) -> bool:
    """Whether these are the last values of metrics."""
    return isinstance(last, dict) and all(isinstance(value, int | float) for value in last.values())
