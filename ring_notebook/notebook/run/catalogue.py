"""The runs on disk: listed with their results, found by the beginning of their name, compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.notebook.panel.report import compare as compare_report
from ring_notebook.notebook.record.run_files import RUN
from ring_notebook.notebook.record.run_record import UNREADABLE, RunRecord, first_line, read_about, read_summary
from ring_notebook.notebook.table import Listing

__all__ = ["compare", "find", "listing", "names", "runs_directory"]

_MOST_METRICS = 6
_COLUMNS = ("run", "name", "started", "ranks", "status", "seconds", "samples/s", "last values of rank 0")


def runs_directory() -> Path:
    """Where runs are kept: RING_RUNS_DIR, by default below the notebook's working directory."""
    return Path(config().runs_dir).absolute()


def listing(most: int = 20) -> Listing:
    """The newest runs with their results, newest first. A note names those that cannot be read."""
    directories = _directories()
    rows, unreadable = [], []
    for directory in reversed(directories[-most:]):
        try:
            rows.append(_row(directory))
        except UNREADABLE as error:
            unreadable.append(f"skipped: {error}")
    older = len(directories) - most
    notes = [*unreadable, f"and {older} older ones in {runs_directory()}" if older > 0 else ""]
    return Listing(_COLUMNS, rows, "\n".join(filter(None, notes)))


def find(name: str) -> RunRecord:
    """The run whose id or name begins with ``name``, the newest when there are several; unreadable ones are skipped.

    Raises RingError that lists the newest runs when there is none.
    """
    directories = _directories()
    for directory in reversed(directories):
        with suppress(*UNREADABLE):
            if directory.name.startswith(name) or read_about(directory)["name"].startswith(name):
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


def _directories() -> list[Path]:
    return sorted(path.parent for path in runs_directory().glob(f"*/{RUN}"))


def _row(directory: Path) -> list[str]:
    about, summary = read_about(directory), read_summary(directory)
    (last, *_) = [*(rank.get("last", {}) for rank in summary.get("ranks", [])), {}]
    dots = ["..."] if len(last) > _MOST_METRICS else []
    return [
        directory.name,
        about["name"] or first_line(about["source"]),
        time.strftime("%d %b %H:%M", time.localtime(about["started"])),
        str(about["size"]),
        summary.get("status", "running or lost"),
        f"{summary['seconds']:.1f}" if summary else "",
        f"{summary['samples_per_s']:.0f}" if summary.get("samples_per_s") else "",
        ", ".join([*(f"{name} {value:.4g}" for name, value in islice(last.items(), _MOST_METRICS)), *dots]),
    ]
