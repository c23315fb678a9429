"""The pytest plugin inside a rank: reports the start and end of each test, and keeps ranks at the same test.

A failure on one rank ends the generation: the others would wait for that rank in a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.protocol import FOLDER, SIZE, report_file, stack_file
from ring_notebook.core.place import unname_shared_memory
from ring_notebook.rank.rank_status import rank_of_process

RANK = rank_of_process()
_ORDER = {"passed": 0, "skipped": 1, "failed": 2}


class RankSide:
    """One rank's part in a launch."""

    def __init__(self, folder: Path) -> None:
        self._report = report_file(folder, RANK).open("a")
        self._stacks = stack_file(folder, RANK).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._outcome: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._meet()
        self._write(event="start", nodeid=item.nodeid, pid=os.getpid())
        self._outcome = {"outcome": "passed", "text": ""}
        result = yield
        self._write(event="end", nodeid=item.nodeid, **self._outcome)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report: pytest.TestReport = yield
        if report.failed:
            self._end_generation(f"test {item.name} failed on rank {RANK}: {call.excinfo and call.excinfo.exconly()}")
        if _ORDER[report.outcome] > _ORDER[self._outcome["outcome"]]:
            self._outcome["outcome"] = report.outcome
            if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
                self._outcome["text"] = report.longrepr[2].removeprefix("Skipped: ")
            else:
                parts = [report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)]
                self._outcome["text"] = f"in {report.when}:\n" + "\n".join(parts)
                self._outcome["aborted"] = call.excinfo is not None and call.excinfo.typename == "CollectiveAborted"
        return report

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._report, flush=True)

    @staticmethod
    def _end_generation(reason: str) -> None:
        world = sys.modules.get("ring_notebook.core.world")
        if world is not None and world.is_initialized():
            world.abort(reason)

    @staticmethod
    def _meet() -> None:
        """Wait until all ranks are between two tests. MPI's own barrier would keep a core busy."""
        if int(os.environ[SIZE]) == 1:
            return
        from mpi4py import MPI

        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            time.sleep(0.001)
        unname_shared_memory()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RankSide(Path(os.environ[FOLDER])), "rank-side")
