"""That an mpiexec which hangs, before its ranks or after them, hangs neither ``ringrun`` nor ``run``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ring_notebook.launch import launcher_watch
from ring_notebook.launch.launcher_watch import LauncherWatch
from ring_notebook.launch.supervisor.rank_failure import split_reports
from ring_notebook.launch.supervisor.rank_mark import RankMark, parse_mark

LIMIT = 200.0
NEVER_STARTS = "echo connecting; sleep 600"
STARTS_ONE = 'shift 2; PMI_RANK=0 "$@" & sleep 600'
STARTS_LATE = 'shift 2; while [ ! -e "$GO" ]; do sleep .1; done; for rank in 0 1; do PMI_RANK=$rank "$@" & done; wait'
NEVER_ENDS = 'shift 2; for rank in 0 1; do PMI_RANK=$rank "$@" & done; wait; sleep 600'
RINGRUN = (
    "import sys; from ring_notebook.launch import cli, launcher_watch; "
    "launcher_watch.{patience} = 1.0; sys.exit(cli.main(sys.argv[1:]))"
)
WARNS, ENDS = RINGRUN.format(patience="_WARN_AFTER"), RINGRUN.format(patience="OUTLIVING")
"""``ringrun`` that says after a second which ranks are missing, or ends a launcher that soon after its ranks."""


WATCHED_FROM = """
import time
from ring_notebook.launch.launcher_watch import LauncherWatch
watch = LauncherWatch._watch
def from_there(self):
    while len(self._started) < {started}: time.sleep(0.01)
    watch(self)
LauncherWatch._watch = from_there
"""
"""The time of the launcher counts from when so many ranks have started, however busy the machine is."""


def mpiexec_of(script: str, folder: Path) -> Path:
    path = folder / "mpiexec"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
    path.chmod(0o755)
    return path


def environment(mpiexec: str, folder: Path, timeout: str = "") -> dict[str, str]:
    path = mpiexec_of(mpiexec, folder)
    own = {"RING_MPIEXEC": str(path), "RING_START_TIMEOUT": timeout, "GO": str(folder / "go")}
    return {**os.environ, **own}


def launch(mpiexec: str, folder: Path, *command: str, timeout: str = "") -> subprocess.CompletedProcess[str]:
    env = environment(mpiexec, folder, timeout)
    return subprocess.run(
        [sys.executable, "-c", *command], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.parametrize(("mpiexec", "started"), [(NEVER_STARTS, 0), (STARTS_ONE, 1)])
def test_a_launcher_that_does_not_start_all_ranks_is_killed(mpiexec: str, started: int, tmp_path: Path) -> None:
    watched = WATCHED_FROM.format(started=started) + WARNS
    done = launch(mpiexec, tmp_path, watched, "--start-timeout", "3", "-np", "2", "sleep", "600")
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert (
        first
        == f"ringrun: the launcher has started {started} of 2 ranks so far; it is killed after 3 s (--start-timeout)"
    )
    assert last.startswith(f"ringrun: the launcher has started {started} of 2 ranks within 3 s; see what it waits for")
    assert f"{tmp_path}/mpiexec -n 2 " in last


def test_run_raises_where_ranks_do_not_start(tmp_path: Path) -> None:
    code = "import ring_notebook\ntry: ring_notebook.run(print, n=2)\nexcept Exception as error: print(error)"
    done = launch(NEVER_STARTS, tmp_path, code, timeout="1")
    assert "the launcher has started 0 of 2 ranks within 1 s; " in done.stdout
    assert "no result from ranks [0, 1]" in done.stdout


def test_ranks_that_start_late_are_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WARNS, "-np", "2", "echo", "hello"]
    pipe, env = subprocess.PIPE, environment(STARTS_LATE, tmp_path)
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as job:
        assert job.stderr is not None
        assert (
            job.stderr.readline()
            == "ringrun: the launcher has started 0 of 2 ranks so far; it is killed after 600 s (--start-timeout)\n"
        )
        (tmp_path / "go").touch()
        assert job.communicate(timeout=LIMIT) == ("hello\nhello\n", "")
    assert job.returncode == 0


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z: what the ranks have said meanwhile has yet to be read."""
    killed = threading.Event()
    jumped: list[float] = []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            jumped.append(0.0)
            return time.monotonic() + 1000.0 * (len(jumped) > 1)  # stopped in the first wait

    monkeypatch.setattr(launcher_watch, "time", Clock)
    watch = LauncherWatch(1, 20.0, killed.set, print, lambda: False)
    deadline = time.monotonic() + LIMIT
    while len(jumped) < 4:  # it has looked again since
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not killed.is_set()
    watch.close()


@pytest.mark.parametrize(("program", "code"), [("echo hello", 0), ("echo hello; exit 7", 7)])
def test_a_launcher_that_outlives_its_ranks_is_killed(program: str, code: int, tmp_path: Path) -> None:
    done = launch(NEVER_ENDS, tmp_path, ENDS, "-np", "2", "sh", "-c", program)
    assert (done.returncode, done.stdout) == (code, "hello\nhello\n")
    if code == 0:
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
    assert parse_mark(body) is None
