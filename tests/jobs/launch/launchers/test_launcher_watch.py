"""That an mpiexec which hangs, before its ranks or after them, hangs neither ``ringrun`` nor ``run``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import mpiexec_of, ran
from harness.waiting import LIMIT
from ring_notebook.launch.supervisor.stderr_reports import RankMark, parse_report, split_reports

NEVER_STARTS = "echo connecting; sleep 600"
STARTS_ONE = 'shift 2; PMI_RANK=0 "$@" & sleep 600'
STARTS_LATE = 'shift 2; while [ ! -e "$GO" ]; do sleep .1; done; for rank in 0 1; do PMI_RANK=$rank "$@" & done; wait'
NEVER_ENDS = 'shift 2; for rank in 0 1; do PMI_RANK=$rank "$@" & done; wait; sleep 600'
RINGRUN = (
    "import sys; from ring_notebook.analysis import time_limits; from ring_notebook.launch import cli; "
    "time_limits.{patience} = 1.0; sys.exit(cli.main(['--no-prefix', *sys.argv[1:]]))"
)
WARNS, ENDS = RINGRUN.format(patience="WARN_START"), RINGRUN.format(patience="OUTLIVING")
"""``ringrun`` that says after a second which ranks are missing, or ends a launcher that soon after its ranks."""


WATCHED_FROM = """
from ring_notebook.launch.job import Job
look = Job._look
def from_there(self):
    if not any(event.kind == "started" for event in self._events): self._deaf = self._looked = self._now()
    look(self)
Job._look = from_there
"""
"""The time of the launcher counts from when a rank has started, however busy the machine is."""


def environment(mpiexec: str, folder: Path, timeout: str = "") -> dict[str, str]:
    own = {"RING_MPIEXEC": str(mpiexec_of(mpiexec, folder)), "RING_START_TIMEOUT": timeout, "GO": str(folder / "go")}
    return {**os.environ, **own}


def launch(mpiexec: str, folder: Path, *command: str, timeout: str = "") -> subprocess.CompletedProcess[str]:
    env = environment(mpiexec, folder, timeout)
    return ran([sys.executable, "-c", *command], env=env, timeout=LIMIT)


def test_a_launcher_that_does_not_start_all_ranks_is_killed(tmp_path: Path) -> None:
    watched = WATCHED_FROM + WARNS
    done = launch(STARTS_ONE, tmp_path, watched, "--start-timeout", "3", "-np", "2", "sleep", "600")
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "ringrun: the launcher has started 1 of 2 ranks so far; it is killed after 3 s (--start-timeout)"
    assert last.startswith("ringrun: the launcher has started 1 of 2 ranks within 3 s; see what it waits for")
    assert f"{tmp_path}/mpiexec -n 2 " in last


def test_run_raises_where_ranks_do_not_start(tmp_path: Path) -> None:
    code = "import ring_notebook\ntry: ring_notebook.run(print, n=2)\nexcept Exception as error: print(error)"
    done = launch(NEVER_STARTS, tmp_path, code, timeout="1")
    assert "the launcher has started 0 of 2 ranks within 1 s; " in done.stdout
    assert "no result from ranks [0, 1]" in done.stdout


STOPPED_FOR_LONG = """
import os
from ring_notebook.launch.job import Job
now = Job._now
Job._now = lambda self: now(self) + 1000.0 * os.path.exists(os.environ["GO"])
"""


def test_ranks_that_start_late_are_waited_for(tmp_path: Path) -> None:
    """The limit does not pass while ringrun is stopped, as by Ctrl-Z."""
    command = [sys.executable, "-c", STOPPED_FOR_LONG + WARNS, "-np", "2", "echo", "hello"]
    pipe, env = subprocess.PIPE, environment(STARTS_LATE, tmp_path)
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as job:
        assert job.stderr is not None
        assert (
            job.stderr.readline()
            == "ringrun: the launcher has started 0 of 2 ranks so far; it is killed after 600 s (--start-timeout)\n"
        )
        job.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        job.send_signal(signal.SIGCONT)
        assert job.communicate(timeout=LIMIT) == ("hello\nhello\n", "")
    assert job.returncode == 0


def test_a_launcher_that_outlives_its_ranks_is_killed(tmp_path: Path) -> None:
    done = launch(NEVER_ENDS, tmp_path, ENDS, "-np", "2", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\nhello\n")
    assert done.stderr == "ringrun: killing the launcher: all ranks ended 1 s ago, and it has not\n"


def test_marks_are_no_output() -> None:
    marks: list[RankMark] = []
    line = b'one\n\x1e{"rank": 1, "ended": true}\x1e\ntwo\n'
    assert split_reports(line, marks.append) == (b"one\ntwo\n", [], b"")
    assert marks == [RankMark(1, True)]


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"rank": 1}', b'{"rank": "1", "ended": true}', b'{"rank": true, "ended": true}', b"[]", b"1",
     b'{"rank": -1, "ended": true}', b'{"rank": 1, "ended": 1}', b'{"rank": 1, "ended": true, "more": 1}', b"[" * 5000],
)  # fmt: skip
def test_what_is_no_mark(body: bytes) -> None:
    assert parse_report(body) is None
