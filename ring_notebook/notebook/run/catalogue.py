"""The runs on disk: listed with their results, found by the beginning of their name, compared."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from itertools import islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.files import checkpoint_folder
from ring_notebook.files.private_files import open_private
from ring_notebook.files.run_folders import RUN, runs_directory
from ring_notebook.notebook.colors import GREY, STATUS_COLORS
from ring_notebook.notebook.panel import labelled_lines
from ring_notebook.notebook.panel.charts.chart import axes
from ring_notebook.notebook.panel.comparison import Comparison, Origin, changes_of
from ring_notebook.notebook.panel.report import figure
from ring_notebook.notebook.record.cell_constants import constants
from ring_notebook.notebook.record.run_files import JOURNAL, OUTPUT_TEXT
from ring_notebook.notebook.record.run_record import (
    UNREADABLE,
    RunRecord,
    first_line,
    inherited,
    read_about,
    read_summary,
    readable,
)
from ring_notebook.notebook.record.run_view import SAMPLES
from ring_notebook.notebook.record.tags_and_look import keep_labels, read_labels
from ring_notebook.notebook.run.takeover import journals_of
from ring_notebook.notebook.style import blocks, shown, sparkline
from ring_notebook.notebook.table import Listing, sort_key
from ring_notebook.text.words import plural

_SHOWN = 6  # metrics and hyper-parameters that a list shows; the others are folded
_TRIVIAL_SECONDS = 10.0  # a cell that ended well before and logged nothing is no experiment
_Lives = Callable[[str, float], bool | None]  # as `cluster_folders.lives`
# Ranks and their notebook write every second. Another host's clock may differ, and its processes cannot be seen here.
_SILENT_HERE, _SILENT_ELSEWHERE = 60.0, 24 * 3600.0
_FACTS = ("name", "status", "samples/s", "J/sample", "kJ", "seconds", "ranks", "checkpoint", "started", "run")
_CURVE = "curve"
_BRANCH = "branch of"
_ASKED = "asked by"
_PIECES = 1000  # of output that are read at a time


def listing(
    most: int = 20,
    *,
    every: bool = False,
    sort: str = "",
    where: Sequence[str] = (),
    lives: _Lives = lambda _cluster, _since: None,
) -> Listing:
    """The newest runs with their results, newest first. A note names unreadable runs.

    Cells that ended well in seconds and logged nothing are left out, unless ``every`` is given. ``sort`` names a
    column, a metric or a hyper-parameter: largest first, or smallest first with a minus before it. Only runs with every
    word of ``where`` in one of their columns are listed; ``lr=0.1`` asks for that value of a hyper-parameter.
    ``lives`` tells runs in progress from lost ones. Raises RingError for a ``sort`` that no run has.
    """
    entries, unreadable, trivial = [], [], 0
    for directory in reversed(_directories()):
        try:
            entry = _Entry(directory, lives)
        except UNREADABLE as error:
            unreadable.append(f"skipped: {error}")
            continue
        if entry.trivial and not every:
            trivial += 1
        elif all(entry.has(word) for word in where):
            entries.append(entry)
    if sort:
        key, largest_first = sort.removeprefix("-"), not sort.startswith("-")
        known = [*_FACTS, *dict.fromkeys(name for one in entries for name in (*one.last, *one.params))]
        if entries and key not in known:
            raise RingError(f"no run has a column {key!r}; the columns are {', '.join(known)}")
        entries.sort(key=lambda one: sort_key(one.value(key), largest_first))
    older = len(entries) - most
    notes = [*unreadable, f"and {older} more in {runs_directory()}" if older > 0 else ""]
    notes += [f"{plural(trivial, 'short cell')} without metrics not listed; --all lists them"] * (trivial > 0)
    notes += [f"no runs {'with these words ' if where else ''}in {runs_directory()}"] * (not entries and not trivial)
    return _listing(entries[:most], "\n".join(filter(None, notes)))


def _listing(entries: Sequence[_Entry], note: str) -> Listing:
    """Columns: name, curve, then metrics and hyper-parameters, those that differ between the runs first, then facts."""
    found = [*dict.fromkeys(name for one in entries for name in (*one.last, *one.params) if name not in _FACTS)]
    differing = [name for name in found if len({repr(one.value(name)) for one in entries}) > 1]
    metrics = [name for name in differing if any(name in one.last for one in entries)]
    metrics.sort(key=lambda name: -sum(name in one.last for one in entries))  # what most runs have is first
    # Metrics and hyper-parameters that differ, in turn: neither crowds the other out.
    params = [name for name in differing if name not in metrics]
    turns = [name for pair in zip_longest(metrics, params) for name in pair if name is not None]
    values = turns if len(entries) > 1 else found
    folded = [*values[_SHOWN:], *(name for name in found if name not in values)]
    optional = [name for name in (_BRANCH, _ASKED, "tags", "note") if any(one.value(name) for one in entries)]
    facts = [name for name in _FACTS[1:] if any(one.value(name) is not None for one in entries)]
    curve = [_CURVE] if any(one.curve for one in entries) else []
    columns = ["name", *curve, *optional, *values[:_SHOWN], *facts, *folded]
    rows = [[one.cell(name) for name in columns] for one in entries]
    pictures = {"name": [one.named() for one in entries], _CURVE: [sparkline(one.curve) for one in entries]}
    keys = {name: [one.value(name) for one in entries] for name in columns if name not in (_CURVE, *optional)}
    return Listing(columns, rows, note, keys if len(rows) > 1 else {}, pictures, folded)


def find(name: str) -> RunRecord:
    """The run with this id or name, else one whose id or name begins so, the newest when there are several.

    Unreadable ones are skipped. A run without a name is called by the first line of its cell, as in the list. Raises
    RingError, which names the newest runs, when there is none.
    """
    begins, known = None, []
    for directory in reversed(_directories()):
        with suppress(*UNREADABLE):
            texts = (directory.name, _name(read_about(directory)))
            known.append(texts[1] or directory.name)
            if name in texts:
                return RunRecord.load(directory)
            if begins is None and any(text.startswith(name) for text in texts):
                begins = RunRecord.load(directory)
    if begins is not None:
        return begins
    newest = ", ".join(map(repr, list(dict.fromkeys(known))[:5]))
    what = f"the newest are {newest}; `%ring runs` lists them" if newest else "there is none yet"
    raise RingError(f"no run {name!r} in {runs_directory()}; {what}")


def resumes_from(name: str, cell_id: str) -> str:
    """The last checkpoint of the newest run of this name that has one; without a name, of the same cell.

    If the front end does not identify cells, any run counts. Raises RingError when there is none.
    """
    for directory in reversed(_directories()):
        with suppress(*UNREADABLE):
            about = read_about(directory)
            same = about["name"] == name if name else cell_id in ("", about["options"].get("cell_id"))
            if same and (there := checkpoint_folder.found_of_run(directory / checkpoint_folder.CHECKPOINTS)):
                return str(there[-1].path)
    which = f"run called {name!r}" if name else "run of this cell"
    raise RingError(
        f"no {which} in {runs_directory()} has a checkpoint; `ring.checkpoint` in the cell makes them: run it without "
        "--resume first, or give the --name of the run to continue"
    )


def names() -> list[str]:
    """The names of runs, or the ids of those without one, newest first and each once."""
    found = readable(reversed(_directories()))
    return list(dict.fromkeys(about["name"] or directory.name for directory, about in found))


def compare(names: Sequence[str]) -> Comparison:
    """Several runs side by side; a single name may be a sweep's, for all its runs.

    Raises RingError for one that does not exist, and for two that are the same run.
    """
    records = (_of_sweep(names[0]) if len(names) == 1 else []) or [find(name) for name in names]
    for index, (name, record) in enumerate(zip(names, records, strict=False)):
        if record.run in {one.run for one in records[:index]}:
            raise RingError(f"{name!r} is {record.run} again, the newest run of that name; `%ring runs` has all ids")
    return compared(records)


def _of_sweep(name: str) -> list[RunRecord]:
    """The newest run for each combination of values in the sweep of this name, in the order of their begin."""
    found: dict[str, RunRecord] = {}
    for directory in reversed(_directories()):
        with suppress(*UNREADABLE):
            title = _name(read_about(directory))
            if name in (title, directory.name):
                return []
            if title.startswith(f"{name} ") and "=" in title:
                found.setdefault(title, RunRecord.load(directory))
    return list(reversed(found.values()))


def compared(records: Sequence[RunRecord]) -> Comparison:
    """Runs side by side, with the runs that their branches continue."""
    return Comparison(records, {record.run: _origins(record.options) for record in records})


def with_inherited(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cell; a branch gets the hyper-parameters of the run that it continues, at its step."""
    for log, step in _origins(options)[:1]:
        taken = [one.values for one in changes_of(log) if one.step <= step]
        params = {name: value for one in (log.params, *taken) for name, value in one.items()}
        return {**options, "branch": {**options["branch"], "params": params}}
    return {**options}


def _origins(options: Mapping[str, Any]) -> list[Origin]:
    """The runs that a branch continues, the nearest first, up to the first that was deleted."""
    found: list[Origin] = []
    while isinstance(branch := options.get("branch"), dict) and branch:
        of, _, step = str(branch.get("of", "")).rpartition("@")
        try:
            record = find(str(branch.get("run") or of))
            found.append(Origin(record, int(step)))
            options = record.options
        except (RingError, ValueError):  # deleted, or written by somebody else
            break
        if record.run in {one.log.run for one in found[:-1]}:  # a cycle, which no version of ours writes
            break
    return found


def plot(
    records: Sequence[RunRecord], metrics: Sequence[str], x: str = "", smooth: float = 0.0, log: bool = False
) -> Any:
    """Charts of metrics, of one run or of several in the same charts, over ``x`` (`Look.x`).

    Raises RingError for a metric that none of the runs has logged, and for an axis that one of them lacks.
    """
    without = [record.title for record in records if x and x not in axes(record.view())]
    if without:
        raise RingError(f"{', '.join(without)}: no x axis {x!r}; log samples, the epoch, and steps that do not go back")
    look = replace(records[0].look, log=log, smooth=smooth)
    try:
        return figure(records, metrics, replace(look, x=x) if x else look)
    except KeyError as error:
        raise RingError(error.args[0]) from None


def tag(name: str, tags: Sequence[str]) -> str:
    """Add tags to a run; without any, remove all. Returns the tags that it has then."""
    record = find(name)
    kept = tuple(dict.fromkeys([*record.labels.tags, *tags])) if tags else ()
    keep_labels(record.directory, replace(record.labels, tags=kept))
    return f"{record.title}: {' '.join(kept) or 'no tags'}"


def annotate(name: str, note: str) -> str:
    """Replace the note of a run; an empty note removes it."""
    record = find(name)
    keep_labels(record.directory, replace(record.labels, note=note))
    return f"{record.title}: {note or 'no note'}"


def write_output(name: str) -> str:
    """Write everything that the ranks of a run have printed to ``output.txt`` in its folder, each line with its rank.

    Returns a line that says where. Progress bars are left as they ended. Raises RingError when there is no such run.
    """
    record = find(name)
    lines, count, path = labelled_lines.Lines(), 0, record.directory / OUTPUT_TEXT
    with open_private(path, "w") as file:
        pieces = record.output()
        while batch := list(islice(pieces, _PIECES)):
            complete = lines.take(batch)
            count += labelled_lines.count(complete)
            file.write(labelled_lines.text(complete))
        rest = lines.take((), last=True)
        file.write(labelled_lines.text(rest))
    return f"Wrote {plural(count + labelled_lines.count(rest), 'line')} to {path}."


def delete(names: Sequence[str], lives: _Lives) -> str:
    """Delete the folders of runs. Raises RingError, and deletes nothing, if one is not there or may be in progress."""
    records = {record.run: record for record in map(find, names)}.values()  # a run may have two names
    for record in records:
        status = "" if record.summary else _without_end(record.directory, read_about(record.directory), lives)
        if status == "running":
            raise RingError(f"run {record.run} has not ended; `%ring stop --runs` in its notebook ends it")
        if status not in ("", "lost"):
            raise RingError(
                f"run {record.run} has not ended, and whether its cluster on another host lives cannot be seen here; "
                f"delete it there, or a day after its last record, or remove {record.directory} by hand"
            )
    for record in records:
        shutil.rmtree(record.directory)
    return f"Deleted {', '.join(record.run for record in records)}."


def _without_end(directory: Path, about: Mapping[str, Any], lives: _Lives) -> str:
    """The status of a run without a summary: it is lost where nobody is left who could write one."""
    cluster = str(about["environment"].get("cluster", ""))
    living = lives(cluster, about["started"])
    written = [directory / RUN, directory / JOURNAL, *journals_of(Path(cluster)).glob(f"{directory.name}.*")]
    last = max((path.stat().st_mtime for path in written if path.exists()), default=0.0)
    silent = time.time() - last > (_SILENT_ELSEWHERE if living is None else _SILENT_HERE)
    if living or (living is False and not silent):
        return "running"
    return "lost" if silent else "running or lost"


def _directories() -> list[Path]:
    return sorted(path.parent for path in runs_directory().glob(f"*/{RUN}"))


def _name(about: dict[str, Any]) -> str:
    return str(about["name"] or first_line(about["source"]))


def _is_written_as(text: str, value: Any) -> bool:
    """Whether ``text`` is a way to write a hyper-parameter, such as ``1e-3`` for 0.001."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(text) == value
    return str(value).lower() == text.lower() if isinstance(value, bool) else str(value) == text


class _Entry:
    """One run of the list, from its two small files and its labels. Raises what UNREADABLE names."""

    def __init__(self, directory: Path, lives: _Lives) -> None:
        self.about, self.summary = read_about(directory), read_summary(directory)
        self.status = self.summary.get("status") or _without_end(directory, self.about, lives)
        self.labels = read_labels(directory)
        self.directory = directory
        lasts = [rank.get("last", {}) for rank in self.summary.get("ranks", [])]
        names = dict.fromkeys(name for last in lasts for name in last if name != SAMPLES)  # samples/s says it
        common = self.summary.get("last", {})  # of a step that all ranks have made
        self.last = {
            name: common[name] if name in common else fmean(last[name] for last in lasts if name in last)
            for name in names
        }
        params = self.summary.get("params")
        if not isinstance(params, dict):
            params = {**constants(self.about["source"]), **inherited(self.about["options"])}
        self.params: dict[str, Any] = params

    @property
    def trivial(self) -> bool:
        short = self.summary.get("status") == "ok" and self.summary["seconds"] < _TRIVIAL_SECONDS
        return short and not self.last and not self.labels.tags and not self.labels.note

    @property
    def curve(self) -> list[float]:
        """A few values of the main metric over the run."""
        return list(self.summary.get("curve", {}).get("values", []))

    @property
    def checkpoint(self) -> str | None:
        """The steps after which there are checkpoints: the last, and the best; and where, if not with the run."""
        own = self.directory / checkpoint_folder.CHECKPOINTS
        if not (there := checkpoint_folder.found_of_run(own)):
            return None
        best = [f"best {one.step}" for one in there if one.best]
        place = str(there[-1].path).rpartition("/")[0]
        return ", ".join([f"step {there[-1].step}", *best]) + f" in {place}" * (place != str(own))

    def value(self, name: str) -> Any:
        """The value in a column, of a metric or of a hyper-parameter; None if there is none."""
        facts = {
            "name": _name(self.about),
            "status": self.status,
            "samples/s": self.summary.get("samples_per_s") or None,
            "J/sample": self._energy("per_sample"),
            "kJ": None if (joules := self._energy("joules")) is None else joules * 1e-3,
            "seconds": self.summary.get("seconds"),
            "ranks": self.about["size"],
            "checkpoint": self.checkpoint,
            "started": self.about["started"],
            "run": self.directory.name,
            _BRANCH: self.about["options"].get("branch", {}).get("of", ""),
            _ASKED: self.about["options"].get("who", ""),
            "tags": " ".join(self.labels.tags),
            "note": self.labels.note,
        }
        return facts[name] if name in facts else self.last.get(name, self.params.get(name))

    def _energy(self, name: str) -> float | None:
        energy = self.summary.get("energy")
        value = energy.get(name) if isinstance(energy, dict) else None
        return value if isinstance(value, int | float) else None

    def cell(self, name: str) -> str:
        """The text in a column."""
        value = self.value(name)
        if name == _CURVE:
            finite = [one for one in self.curve if math.isfinite(one)]
            return blocks(self.curve, min(finite), max(finite)) if finite else ""
        if name == "started":
            return time.strftime("%d %b %H:%M", time.localtime(value))
        if name == "samples/s" and value:
            return f"{value:.0f}"
        if name == "seconds" and value is not None:
            return f"{value:.1f}"
        return "" if value is None else shown(value)

    def named(self) -> str:
        """The name behind a dot in the color of the status, as HTML."""
        status, name = self.cell("status"), self.cell("name")
        dot = f"<span title='{escape(status)}' style='color:{STATUS_COLORS.get(status, GREY)}'>●</span>"
        return f"{dot} <span title='{escape(name, quote=True)}'>{escape(name)}</span>"

    def has(self, word: str) -> bool:
        name, equals, wanted = word.partition("=")
        if equals and name in self.params:
            return _is_written_as(wanted, self.params[name])
        texts = (self.cell(one) for one in (*_FACTS, "tags", "note", *self.last))
        given = (f"{name} {self.cell(name)}" for name in self.params)
        return any(word.lower() in text.lower() for text in (*texts, *given))
