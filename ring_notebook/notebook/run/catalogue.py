"""The runs on disk: listed with their results, found by the beginning of their name, compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.notebook.panel.report import compare as compare_report
from ring_notebook.notebook.record.choices import keep_labels, read_labels
from ring_notebook.notebook.record.constants import constants
from ring_notebook.notebook.record.run_files import RUN
from ring_notebook.notebook.record.run_record import UNREADABLE, RunRecord, first_line, read_about, read_summary
from ring_notebook.notebook.record.run_view import SAMPLES
from ring_notebook.notebook.style import plural
from ring_notebook.notebook.table import Listing

__all__ = ["annotate", "compare", "delete", "find", "listing", "names", "runs_directory", "tag"]

_MOST_METRICS = 6
_MOST_PARAMS = 6
_TRIVIAL_SECONDS = 10.0  # a cell that ended well before and logged nothing is no experiment
_PARAMS, _LAST = "parameters", "last values"
_OPTIONAL = (_PARAMS, "tags", "note")  # columns that are left out where they are empty
_SORTED = ("name", "started", "ranks", "status", "seconds", "samples/s")  # columns that a page can sort by
_COLUMNS = ("name", _LAST, _PARAMS, "status", "samples/s", "seconds", "ranks", "started", "run", "tags", "note")


def runs_directory() -> Path:
    """Where runs are kept: RING_RUNS_DIR, by default below the notebook's working directory."""
    return Path(config().runs_dir).absolute()


def listing(most: int = 20, *, every: bool = False, sort: str = "", where: Sequence[str] = ()) -> Listing:
    """The newest runs with their results, newest first. A note names those that cannot be read.

    Cells that ended well in seconds and logged nothing are left out, unless ``every`` is given. ``sort`` names a
    column, a metric or a hyper-parameter: largest first, or smallest first with a minus before it. Of the runs only
    those are listed that have every word of ``where`` in one of their columns; ``lr=0.1`` asks for that value of a
    hyper-parameter.
    """
    entries, unreadable, trivial = [], [], 0
    for directory in reversed(_directories()):
        try:
            entry = _Entry(directory)
        except UNREADABLE as error:
            unreadable.append(f"skipped: {error}")
            continue
        if entry.trivial and not every:
            trivial += 1
        elif all(entry.has(word) for word in where):
            entries.append(entry)
    if sort:
        key = sort.removeprefix("-")
        known = [one for one in entries if one.value(key) is not None]
        known.sort(key=lambda one: one.order(key), reverse=not sort.startswith("-"))
        entries = known + [one for one in entries if one.value(key) is None]
    older = len(entries) - most
    notes = [*unreadable, f"and {older} more in {runs_directory()}" if older > 0 else ""]
    notes += [f"{plural(trivial, 'short cell')} without metrics not listed; --all lists them"] * (trivial > 0)
    entries = entries[:most]
    shown = [entry.row() for entry in entries]
    kept = [index for index, name in enumerate(_COLUMNS) if name not in _OPTIONAL or any(row[index] for row in shown)]
    rows = [[row[index] for index in kept] for row in shown]
    under = {
        **dict.fromkeys(list(dict.fromkeys(name for one in entries for name in one.params))[:_MOST_PARAMS], _PARAMS),
        **dict.fromkeys(list(dict.fromkeys(name for one in entries for name in one.last))[:_MOST_METRICS], _LAST),
    }
    under = {name: column for name, column in under.items() if name not in _SORTED}
    keys = {name: [one.value(name) for one in entries] for name in (*_SORTED, *under)}
    columns = [_COLUMNS[index] for index in kept]
    return Listing(columns, rows, "\n".join(filter(None, notes)), keys if len(rows) > 1 else {}, under)


def find(name: str) -> RunRecord:
    """The run whose id or name begins with ``name``, the newest when there are several; unreadable ones are skipped.

    One without a name has the first line of its cell for one, as in the list.

    Raises RingError that lists the newest runs when there is none.
    """
    directories = _directories()
    for directory in reversed(directories):
        with suppress(*UNREADABLE):
            if directory.name.startswith(name) or _name(read_about(directory)).startswith(name):
                return RunRecord.load(directory)
    known = ", ".join(directory.name for directory in directories[-5:]) or "none"
    raise RingError(f"no run {name!r} in {runs_directory()}; the newest are: {known}")


def names() -> list[str]:
    """The names of runs, or the ids of those without one, newest first and each once."""
    found = []
    for directory in reversed(_directories()):
        with suppress(*UNREADABLE):
            found.append(read_about(directory)["name"] or directory.name)
    return list(dict.fromkeys(found))


def compare(names: Sequence[str]) -> Any:
    """The curves of several runs in one figure. Raises RingError for one that does not exist."""
    return compare_report([find(name) for name in names])


def tag(name: str, tags: Sequence[str]) -> str:
    """Give a run these tags beside those that it has; without one take all away. Returns what it has then."""
    record = find(name)
    kept = tuple(dict.fromkeys([*record.labels.tags, *tags])) if tags else ()
    keep_labels(record.directory, replace(record.labels, tags=kept))
    return f"{record.title}: {' '.join(kept) or 'no tags'}"


def annotate(name: str, note: str) -> str:
    """Give a run a note in place of the one that it has; an empty one takes it away."""
    record = find(name)
    keep_labels(record.directory, replace(record.labels, note=note))
    return f"{record.title}: {note or 'no note'}"


def delete(names: Sequence[str]) -> str:
    """Delete the folders of runs. Raises RingError, and deletes nothing, when one is not there or has not ended."""
    records = [find(name) for name in names]
    for record in records:
        if not record.summary:
            what = f"run {record.run} has not ended, or its notebook is gone"
            raise RingError(f"{what}; `%ring interrupt` ends it, and {record.directory} can be deleted by hand")
    for record in records:
        shutil.rmtree(record.directory)
    return f"Deleted {', '.join(record.run for record in records)}."


def _directories() -> list[Path]:
    return sorted(path.parent for path in runs_directory().glob(f"*/{RUN}"))


def _name(about: dict[str, Any]) -> str:
    """The name of a run in the list."""
    return str(about["name"] or first_line(about["source"]))


class _Entry:
    """One run of the list, from its two small files and its labels. Raises what UNREADABLE names."""

    def __init__(self, directory: Path) -> None:
        self.about, self.summary = read_about(directory), read_summary(directory)
        self.labels = read_labels(directory)
        self.directory = directory
        (last, *_) = [*(rank.get("last", {}) for rank in self.summary.get("ranks", [])), {}]
        self.last = {name: value for name, value in last.items() if name != SAMPLES}  # the samples/s tell it
        params = self.summary.get("params")
        self.params: dict[str, Any] = params if isinstance(params, dict) else constants(self.about["source"])

    @property
    def trivial(self) -> bool:
        summary = self.summary
        short = summary.get("status") == "ok" and summary["seconds"] < _TRIVIAL_SECONDS
        return short and not self.last and not self.labels.tags and not self.labels.note

    def value(self, name: str) -> Any:
        """The value in a column, of a metric or of a hyper-parameter; None where there is none."""
        facts = {
            "run": self.directory.name,
            "name": self.about["name"],
            "started": self.about["started"],
            "ranks": self.about["size"],
            "status": self.summary.get("status"),
            "seconds": self.summary.get("seconds"),
            "samples/s": self.summary.get("samples_per_s"),
        }
        return facts.get(name, self.last.get(name, self.params.get(name)))

    def order(self, name: str) -> tuple[bool, Any]:
        """What sorts numbers among themselves, and texts before them."""
        value = self.value(name)
        number = isinstance(value, int | float)
        return number, value if number else str(value)

    def has(self, word: str) -> bool:
        name, equals, wanted = word.partition("=")
        if equals and name in self.params:
            return str(self.params[name]) == wanted
        return any(word.lower() in cell.lower() for cell in self.row())

    def row(self) -> list[str]:
        summary, dots = self.summary, ["..."] if len(self.last) > _MOST_METRICS else []
        given = [f"{name} {_short(value)}" for name, value in self.params.items()]
        return [
            _name(self.about),
            ", ".join([*(f"{name} {value:.4g}" for name, value in islice(self.last.items(), _MOST_METRICS)), *dots]),
            ", ".join(given[:_MOST_PARAMS] + ["..."] * (len(given) > _MOST_PARAMS)),
            summary.get("status", "running or lost"),
            f"{summary['samples_per_s']:.0f}" if summary.get("samples_per_s") else "",
            f"{summary['seconds']:.1f}" if summary else "",
            str(self.about["size"]),
            time.strftime("%d %b %H:%M", time.localtime(self.about["started"])),
            self.directory.name,
            " ".join(self.labels.tags),
            self.labels.note,
        ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
