"""The pytest plugin that runs folders of tests in parallel lanes and reports all of them as one run.

A lane is a fork of the first pytest (which a user started, and which collects all tests) for the tests of one folder.
It writes its reports to a file. The first pytest starts a lane whenever fewer than `AT_ONCE` run, and repeats their
reports file by file, with one summary and one exit code at the end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.leftovers import TOKEN, own_shared_memory
from ring_notebook.launch.supervisor.parent_death import bind_to_parent

__all__ = ["LANES", "Lane", "Reporter"]

LANES = ("notebook", "jobs", "hosts", "browser", "notebook/cluster", "native", "attack", "elastic")
"""The folder of each lane, without those in it that are lanes themselves. The longest lanes begin first."""

AT_ONCE = 4
"""Lanes that run beside the first pytest: on two cores the tests of two often sleep and wait for one another."""

SILENCE = 600.0
"""Seconds without a report until a lane counts as stuck. The limit of a test is much shorter."""

FAREWELL = 20.0
"""Seconds that an interrupted lane has for its fixtures to end what they started."""


class Lane:
    """A lane as the first pytest sees it."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self.items = list(items)
        self._config = config
        self._missing = {item.nodeid: item for item in items}
        self._folder = Path(tempfile.mkdtemp(prefix="test-lane-"))
        self._read = 0
        self._over = False
        self._deadline: float | None = None
        self._lines: list[dict[str, Any]] = []
        self._go, self._turn = os.pipe()
        self._pid: int | None = None
        self._code: int | None = None
        self.began = False

    def fork(self) -> bool:
        """Fork the lane. Returns False in the first pytest, and True in the lane when it is started."""
        first = os.getpid()
        self._pid = os.fork()
        if self._pid:
            os.close(self._go)
            return False
        os.setsid()  # Ctrl-C comes only once, through `interrupt`
        bind_to_parent(first)
        os.read(self._go, 1)
        self._become_a_pytest()
        return True

    def start(self) -> None:
        """Let it run its tests."""
        os.write(self._turn, b"1")
        self.began = True

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self.began and self._poll() is None

    def repeat(self) -> None:
        """Report the tests of all files that the lane has finished."""
        self._take()
        files = [line["nodeid"].split("::")[0] for line in self._lines]
        self._say(next((at for at, file in enumerate(files) if file == files[-1]), 0))

    def more(self, session: pytest.Session) -> bool:
        """Report what has arrived, after the first pytest has run its own tests. Returns whether more may arrive.

        A test that the lane did not finish has failed.
        """
        if not self.began:
            return True
        if self._over:
            return False
        ended = not self.runs  # before the reports are read, so that none is missed
        if self._take() or self._deadline is None:
            self._deadline = time.monotonic() + SILENCE
        self.repeat()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if not ended and time.monotonic() < self._deadline:
            return True
        self._over = True
        self._say(len(self._lines))
        if self._missing:
            self._lost(f"ended with code {self._code}" if ended else f"was silent for {SILENCE:.0f} s")
        return False

    def interrupt(self) -> None:
        """Interrupt the lane, if it still runs: the first pytest was interrupted."""
        if self._pid is not None and self._poll() is None:
            os.kill(self._pid, signal.SIGINT if self.began else signal.SIGKILL)

    def close(self) -> None:
        """Wait for an interrupted lane; kill it if it does not end."""
        os.close(self._turn)
        if self._pid is not None:
            deadline = time.monotonic() + FAREWELL
            while self._poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            while self._poll() is None:
                time.sleep(0.02)
        shutil.rmtree(self._folder)

    def _poll(self) -> int | None:
        """The exit code of the lane, None while it runs."""
        if self._code is None and self._pid is not None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def _become_a_pytest(self) -> None:
        """In the lane: separate its output, shared memory and leftovers from those of the first pytest."""
        config, manager = self._config, self._config.pluginmanager
        config.workerinput = {}  # type: ignore[attr-defined]  # the sign of a worker: pytest keeps no cache and no files of it
        # A token of its own: each pytest looks for leftovers of its own tests.
        os.environ.pop(TOKEN, None)
        own_shared_memory()
        self._output = (self._folder / "output.txt").open("wb")
        capture = manager.get_plugin("capturemanager")
        assert capture is not None
        capture.suspend_global_capture()
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, file in enumerate((null, self._output.fileno(), self._output.fileno())):
            os.dup2(file, descriptor)
        os.close(null)
        # The capture stays, because an imported module may have kept its sys.stderr. Only its files are replaced.
        for captured in (capture._global_capturing.out, capture._global_capturing.err):
            with tempfile.TemporaryFile() as own:
                os.dup2(own.fileno(), captured.tmpfile.fileno())
            os.dup2(self._output.fileno(), captured.targetfd_save)
        faulthandler.enable(self._output)
        manager.register(Reporter(config, self._folder / "reports.jsonl"), "lane-reporter")

    def _take(self) -> int:
        """Read the lines that are new in the file; returns their number."""
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
        """Fail the test at which the lane ended; the tests after it did not run."""
        item = next(iter(self._missing.values()))
        output = (self._folder / "output.txt").read_text(errors="replace")[-8000:]
        text = f"this lane {why}; {len(self._missing)} of its tests did not finish, this one is the first\n"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{text}--- its output\n{output}", "call")
        self._config.hook.pytest_runtest_logreport(report=report)


class Reporter:
    """The plugin in a lane: writes reports to the file for the first pytest."""

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


_LANES = pytest.StashKey[list[Lane]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool, bool]:
    """Give the tests of some folders to lanes. The first pytest keeps the others, or those of one lane."""
    option = session.config.option
    by_hand = option.usepdb or option.capture == "no" or option.collectonly or option.basetemp
    kept, *beside = _divided(session)
    if by_hand or not beside:
        return (yield)
    lanes: list[Lane] = []
    gc.collect()
    gc.freeze()  # the collected tests stay in memory that all lanes share
    try:
        for items in beside:
            lanes.append(Lane(session.config, items))
            if lanes[-1].fork():
                lanes, session.items = [], items
                return (yield)
        session.config.stash[_LANES] = lanes
        session.items = kept
        _start_some(lanes)
        result = yield
        while [lane for lane in lanes if lane.more(session)]:
            _start_some(lanes)
            time.sleep(0.05)
    finally:
        for lane in lanes:
            lane.interrupt()
        for lane in lanes:
            lane.close()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    result = yield
    lanes = item.config.stash.get(_LANES, [])
    _start_some(lanes)
    if nextitem is None or nextitem.path != item.path:
        for lane in lanes:
            lane.repeat()
    return result


def _start_some(lanes: Sequence[Lane]) -> None:
    """Start the next lanes, if fewer than AT_ONCE run."""
    waiting = [lane for lane in lanes if not lane.began]
    for lane in waiting[: max(0, AT_ONCE - sum(lane.runs for lane in lanes)) if waiting else 0]:
        lane.start()


def _divided(session: pytest.Session) -> list[list[pytest.Item]]:
    """The tests that run in parallel: those of no lane, then those of each lane. No list is empty."""
    root = Path(session.config.rootpath, "tests")
    lane_of = {root / name: at for at, name in enumerate(LANES, 1)}
    divided: list[list[pytest.Item]] = [[] for _ in range(len(LANES) + 1)]
    for item in session.items:
        divided[next((lane_of[folder] for folder in item.path.parents if folder in lane_of), 0)].append(item)
    return [items for items in divided if items] or [[]]
