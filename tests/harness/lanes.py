"""The pytest plugin that runs tests that mostly wait beside those that compute, and reports both as one run.

A second pytest gets the tests of the folders that wait. It writes its reports into a file, from which the first one,
which a user started, repeats them: file by file, with one summary and one exit code at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.leftovers import TOKEN
from ring_notebook.launch.supervisor.parent_death import wrap

__all__ = ["WAITING", "Lane", "Reporter"]

WAITING = ("attack", "browser", "elastic", "hosts", "notebook")
"""Folders of tests whose processes mostly sleep: they start, wait for one another, and are killed."""

REPORTS = "TEST_LANE_REPORTS"
"""Environment: the file to which the second pytest writes its reports. Its presence means: this is the second."""

SILENCE = 600.0
"""Seconds without a report until the second pytest counts as stuck. Its own limits end a test long before."""

FAREWELL = 20.0
"""Seconds that an interrupted second pytest has for its fixtures to end what they started."""


class Lane:
    """The second pytest, as the first one sees it."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self._config = config
        self._missing = {item.nodeid: item for item in items}
        self._folder = Path(tempfile.mkdtemp(prefix="test-lane-"))
        self._read = 0
        self._lines: list[dict[str, Any]] = []
        timeout = config.getoption("timeout", None)
        program = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-o", "addopts=--strict-markers --strict-config --import-mode=importlib"),  # they have been chosen
            *([] if timeout is None else [f"--timeout={timeout}"]),
            *self._missing,
        ]
        # A token of its own: each pytest looks for leftovers of its own tests.
        env = {name: value for name, value in os.environ.items() if name != TOKEN}
        with (self._folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                wrap(program),
                cwd=config.rootpath,
                env={**env, REPORTS: str(self._folder / "reports.jsonl")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the terminal comes once, from `close`
            )

    def repeat(self) -> None:
        """Report the tests of all files that the second pytest has finished."""
        self._take()
        files = [line["nodeid"].split("::")[0] for line in self._lines]
        self._say(next((at for at, file in enumerate(files) if file == files[-1]), 0))

    def follow(self, session: pytest.Session) -> None:
        """Wait for the second pytest and report the rest; a test that it did not finish has failed."""
        deadline = time.monotonic() + SILENCE
        while True:
            ended = self._process.poll() is not None  # before the reports are read, so that none is missed
            if self._take():
                deadline = time.monotonic() + SILENCE
            self.repeat()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if ended or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self._say(len(self._lines))
        if self._missing:
            self._lost(f"ended with code {self._process.returncode}" if ended else f"said nothing for {SILENCE:.0f} s")

    def close(self) -> None:
        """End the second pytest, which by then has ended unless the first one was interrupted."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            self._process.wait(FAREWELL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder)

    def _take(self) -> int:
        """Read what has been written since the last time; the number of new lines."""
        try:
            with (self._folder / "reports.jsonl").open("rb") as reports:
                reports.seek(self._read)
                whole = reports.read().rpartition(b"\n")
        except FileNotFoundError:
            return 0
        self._read += len(whole[0]) + len(whole[1])
        lines = [json.loads(line) for line in whole[0].splitlines()]
        self._lines += lines
        return len(lines)

    def _say(self, count: int) -> None:
        """Report the first ``count`` lines as if the tests had run here."""
        hook = self._config.hook
        for line in self._lines[:count]:
            if "report" in line:
                report = hook.pytest_report_from_serializable(config=self._config, data=line["report"])
                if isinstance(report.longrepr, list):  # JSON has no tuples: file, line and reason of a skipped test
                    report.longrepr = tuple(report.longrepr)
                hook.pytest_runtest_logreport(report=report)
            elif line["event"] == "start":
                hook.pytest_runtest_logstart(nodeid=line["nodeid"], location=tuple(line["location"]))
            else:
                hook.pytest_runtest_logfinish(nodeid=line["nodeid"], location=tuple(line["location"]))
                del self._missing[line["nodeid"]]
        del self._lines[:count]

    def _lost(self, why: str) -> None:
        """Fail the test at which the second pytest ended; those after it did not run."""
        item = next(iter(self._missing.values()))
        output = (self._folder / "output.txt").read_text(errors="replace")[-8000:]
        text = f"the pytest beside {why}; {len(self._missing)} of its tests did not finish, this one is the first\n"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{text}--- its output\n{output}", "call")
        self._config.hook.pytest_runtest_logreport(report=report)


class Reporter:
    """The plugin in the second pytest: writes down all that the first one is to repeat."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("a")

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._write(event="start", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(nodeid=report.nodeid, report=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._write(event="finish", nodeid=nodeid, location=location)

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._file, flush=True)


_LANE = pytest.StashKey[Lane]()


def pytest_configure(config: pytest.Config) -> None:
    if REPORTS in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[REPORTS])), "lane-reporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool, bool]:
    """Give the tests that wait to a second pytest, if there are others beside which it can run."""
    beside = list(_waiting(session))
    by_hand = session.config.option.usepdb or session.config.option.capture == "no" or session.config.option.collectonly
    if REPORTS in os.environ or by_hand or not 0 < len(beside) < len(session.items):
        return (yield)
    lane = session.config.stash[_LANE] = Lane(session.config, beside)
    given = {id(item) for item in beside}
    session.items = [item for item in session.items if id(item) not in given]
    try:
        result = yield
        lane.follow(session)
    finally:
        lane.close()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    result = yield
    if _LANE in item.config.stash and (nextitem is None or nextitem.path != item.path):
        item.config.stash[_LANE].repeat()
    return result


def _waiting(session: pytest.Session) -> Iterator[pytest.Item]:
    folders = {Path(session.config.rootpath, "tests", name) for name in WAITING}
    return (item for item in session.items if folders & set(item.path.parents))
