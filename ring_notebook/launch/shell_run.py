"""Keeps what is known of a training that `ringrun` has run, so that `%ring runs` lists it beside those of notebooks."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ring_notebook.analysis.time_breakdown import RankTimes
from ring_notebook.files.private_files import make_private_folder, replace_text
from ring_notebook.files.run_folders import RUN, SUMMARY, new_run_id, runs_directory

_LONGEST_SOURCE = 1 << 20  # bytes


class ShellRun:
    """A job of ``n`` ranks that starts now."""

    def __init__(self, command: Sequence[str], n: int) -> None:
        self._command = list(command)
        self._n = n
        self._id = new_run_id()
        self._started = time.time()

    def keep(self, status: str, error: str, times: Mapping[int, RankTimes]) -> None:
        """Write the files of the run, which has ended: what its ranks have measured, and the last row of each.

        Raises OSError where they cannot be written.
        """
        seconds = max(one.seconds for one in times.values())
        samples = sum(one.samples for one in times.values())
        about = {
            "run": self._id,
            "name": Path(self._script).name if self._script else self._command[0],
            "size": max(self._n, 1 + max(times)),
            "source": self._source(),
            "options": {},
            "environment": {"command": shlex.join(self._command), "directory": os.getcwd()},
            "started": self._started,
        }
        summary = {
            "status": status,
            "error": error,
            "seconds": round(time.time() - self._started, 3),
            "samples": samples,
            "samples_per_s": samples / seconds if seconds else 0.0,
            "ranks": [
                {"rank": rank, "step": one.steps, "samples_per_s": one.samples / one.seconds, "last": one.last}
                for rank, one in sorted(times.items())
                if one.seconds
            ],
        }
        folder = runs_directory() / self._id
        make_private_folder(folder)
        replace_text(folder / SUMMARY, json.dumps(summary, indent=1))
        replace_text(folder / RUN, json.dumps(about, indent=1))  # last: without it there is no run

    @property
    def _script(self) -> str:
        return next((word for word in self._command if word.endswith(".py")), "")

    def _source(self) -> str:
        """The text of the script; the command where it is none."""
        with suppress(OSError):
            if self._script:
                with open(self._script, "rb") as file:
                    return file.read(_LONGEST_SOURCE).decode(errors="replace")
        return shlex.join(self._command)
