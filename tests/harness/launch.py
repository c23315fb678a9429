"""Tests on P ranks: starts the ranks, follows their reports, and ends stuck ones."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.forked_ranks import ForkServer
from harness.leftovers import processes_with
from harness.protocol import FOLDER, SIZE, report_file, stack_file
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.supervisor.parent_death import wrap

__all__ = ["TEST_LIMIT", "Launch", "Outcome"]

START_LIMIT = 200.0
"""Seconds until the first test must have started: ranks import torch on a busy machine."""

TEST_LIMIT = 120.0
"""Seconds until a test fails inside its rank; the failure shows its line."""

NEARLY = 3
"""Tests left when the next launch may begin, because ranks need seconds to import torch."""

SECONDS_TO_WRITE = 10.0
"""Seconds that stuck ranks have to write their stacks."""

KILL_AFTER = 5.0
"""Seconds after the limit of a test until its ranks are killed, if Python could not interrupt the line."""


@dataclass(frozen=True)
class Outcome:
    """A test on all ranks: ``failed`` if it failed on any rank; ``text`` is the output of these ranks."""

    outcome: str
    text: str


class Launch:
    """One mpiexec for several tests; after a test that ends it, another one runs the rest.

    A single rank starts without mpiexec and MPI, like a user's script. ``server``, unless None, forks the ranks.
    """

    def __init__(self, root: Path, nodeids: Sequence[str], size: int, server: ForkServer | None = None) -> None:
        self._server = server
        self._root = root
        self._size = size
        self._waiting = list(nodeids)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._broken = ""

    def begin(self) -> None:
        """Start the ranks, unless they run or no test is left: pytest without a test would run all tests."""
        if self._process is None and self._waiting and not self._broken:
            self._start()

    @property
    def nearly_done(self) -> bool:
        """Whether only a few tests are left."""
        return len(self._waiting) <= NEARLY

    def result(self, nodeid: str, limit: float) -> Outcome:
        """Wait for one test, which may take ``limit`` seconds. Call it for tests in their order."""
        if self._broken:
            return Outcome("failed", self._broken)
        self.begin()
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT
        started = False
        while True:
            ended = self._process.poll() is not None  # before the reports are read, so that none is missed
            events = [self._events(rank, nodeid) for rank in range(self._size)]
            if all("end" in event for event in events):
                self._waiting.remove(nodeid)
                if not self._waiting:
                    self.close()
                return _merged([event["end"] for event in events])
            if not started and any("start" in event for event in events):
                started, deadline = True, time.monotonic() + limit + KILL_AFTER
            if ended or time.monotonic() > deadline:
                return self._lost(nodeid, events, started, limit, ended)
            time.sleep(0.005)

    def close(self) -> None:
        """End the ranks. Raises AssertionError if some are still there."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10 if not self._waiting else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5
        while (left := processes_with(FOLDER, str(self._folder))) and time.monotonic() < deadline:
            time.sleep(0.05)
        for line in left:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(self._folder)
        assert not left, "processes left behind by the ranks:\n" + "\n".join(left)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="test-ranks-"))
        program = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-m",
            "",  # the tests are chosen already, slow ones too
            f"--timeout={TEST_LIMIT}",
            "-q",
            *self._waiting,
        ]
        command = find_launcher().command(program, self._size) if self._size > 1 else program
        forks = contextlib.nullcontext() if self._server is None else self._server.used()
        with (self._folder / "output.txt").open("wb") as output, forks:
            self._process = subprocess.Popen(
                wrap(command),
                cwd=self._root,
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    FOLDER: str(self._folder),
                    SIZE: str(self._size),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _events(self, rank: int, nodeid: str) -> dict[str, dict[str, Any]]:
        """The reports of ``rank`` about a test: its start and its end."""
        try:
            lines = report_file(self._folder, rank).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return {}
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        return {event["event"]: event for event in events if event["nodeid"] == nodeid}

    def _lost(self, nodeid: str, events: list[dict[str, Any]], started: bool, limit: float, ended: bool) -> Outcome:
        """The outcome of a test that does not end, with all that is known. Ends the ranks, so that the next can run."""
        unfinished = [rank for rank, event in enumerate(events) if "end" not in event]
        if ended:
            reason = f"the ranks ended before ranks {unfinished} had finished the test"
            stacks = ""
        else:
            reason = f"ranks {unfinished} did not finish within {limit if started else START_LIMIT:.0f} s"
            stacks = self._stacks(
                {rank: event["start"]["pid"] for rank, event in enumerate(events) if "start" in event}
            )
        said = _merged([event["end"] for event in events if "end" in event]).text
        output = _both_ends((self._folder / "output.txt").read_text(errors="replace"))
        text = "\n".join(part for part in (reason, said, stacks, f"--- output of the ranks\n{output}") if part)
        if not started:
            self._broken = text
        self._waiting.remove(nodeid)
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()
        return Outcome("failed", text)

    def _stacks(self, pids: Mapping[int, int]) -> str:
        """The stacks of the ranks with the processes ``pids``."""
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        before, sizes, deadline = [-1], [0], time.monotonic() + SECONDS_TO_WRITE
        while (0 in sizes or sizes != before) and time.monotonic() < deadline:
            time.sleep(0.3)
            before, sizes = sizes, [stack_file(self._folder, rank).stat().st_size for rank in pids]
        parts = []
        for rank in range(self._size):
            with contextlib.suppress(FileNotFoundError):
                parts.append(f"--- stacks of rank {rank}\n{stack_file(self._folder, rank).read_text()}")
        return "\n".join(parts)


def _both_ends(output: str, most: int = 4000) -> str:
    """The beginning and the end of a long output; the first error is at the beginning."""
    if len(output) <= 2 * most:
        return output
    return f"{output[:most]}\n[... {len(output) - 2 * most} characters ...]\n{output[-most:]}"


def _merged(ends: list[dict[str, Any]]) -> Outcome:
    """One outcome of all ranks. Ranks that failed by themselves come before aborted ones."""
    bad = [(end.get("aborted", False), rank, end) for rank, end in enumerate(ends) if end["outcome"] == "failed"]
    if bad:
        bad.sort(key=lambda entry: entry[:2])
        return Outcome("failed", "\n".join(f"===== rank {rank} of {len(ends)}, {end['text']}" for _, rank, end in bad))
    if ends and all(end["outcome"] == "skipped" for end in ends):
        return Outcome("skipped", ends[0]["text"])
    return Outcome("passed", "")
