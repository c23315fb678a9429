"""The runs on disk: listed with their results, found by a part of their name, compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.errors import RingError
from ring_notebook.notebook.panel.report import compare as compare_report
from ring_notebook.notebook.record.run_files import RUN, SUMMARY, read_json
from ring_notebook.notebook.record.run_log import RunRecord
from ring_notebook.notebook.table import Listing

__all__ = ["compare", "find", "listing", "runs_directory"]

_COLUMNS = ("run", "name", "started", "ranks", "status", "seconds", "samples/s", "last values of rank 0")


def runs_directory() -> Path:
    """Where runs are kept: RING_RUNS_DIR, by default below the notebook's working directory."""
    return Path(config().runs_dir).absolute()


def listing(most: int = 20) -> Listing:
    """The newest runs with what they came to, newest first."""
    directories = _directories()
    rows = [_row(directory) for directory in reversed(directories[-most:])]
    hidden = len(directories) - len(rows)
    return Listing(_COLUMNS, rows, f"and {hidden} older ones in {runs_directory()}" if hidden > 0 else "")


def find(name: str) -> RunRecord:
    """The run whose id or name begins with ``name``, the newest when there are several.

    Raises RingError that lists the names there are.
    """
    directories = _directories()
    for directory in reversed(directories):
        if directory.name.startswith(name) or read_json(directory / RUN)["name"].startswith(name):
            return RunRecord.load(directory)
    known = ", ".join(directory.name for directory in directories[-5:]) or "none"
    raise RingError(f"no run {name!r} in {runs_directory()}; the last ones are: {known}")


def compare(names: Sequence[str]) -> Any:
    """The curves of several runs in one figure. Raises RingError for a run that is not there."""
    return compare_report([find(name) for name in names])


def _directories() -> list[Path]:
    return sorted(path.parent for path in runs_directory().glob(f"*/{RUN}"))


def _row(directory: Path) -> list[str]:
    about = read_json(directory / RUN)
    summary = read_json(directory / SUMMARY)
    ranks = summary.get("ranks") or [{}]
    return [
        directory.name,
        about["name"],
        time.strftime("%d %b %H:%M", time.localtime(about["started"])),
        str(about["size"]),
        summary.get("status", "running or lost"),
        f"{summary['seconds']:.1f}" if summary else "",
        f"{summary['samples_per_s']:.0f}" if summary.get("samples_per_s") else "",
        ", ".join(f"{name} {value:.4g}" for name, value in ranks[0].get("last", {}).items()),
    ]
