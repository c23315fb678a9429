"""The folder of all runs, and the names of a run and of its files."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from ring_notebook.config import config

RUN = "run.json"
"""Source, options, environment, size, start."""
SUMMARY = "summary.json"
"""How the run ended."""


def new_run_id() -> str:
    """A name for the folder of a run that starts now."""
    now = time.time()
    # To the millisecond, so that ids sort in the order in which runs were started.
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03d}{uuid.uuid4().hex[:2]}"


def runs_directory() -> Path:
    """Where runs are kept: RING_RUNS_DIR, by default below the notebook's working directory."""
    return Path(config().runs_dir).absolute()
