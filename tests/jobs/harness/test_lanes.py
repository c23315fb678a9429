"""Tests that wait run beside those that compute: one report, whatever becomes of either side."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.leftovers import TOKEN
from harness.waiting import until

TESTS = Path(__file__).parents[2]
# Each side waits for the other's file, which only a side that runs at the same time can make.
MEET = """
import os, pathlib, subprocess, sys, time
import pytest
HERE = pathlib.Path(__file__).parents[2]
def meet(mine, other):
    (HERE / mine).touch()
    while not (HERE / other).exists():
        time.sleep(0.01)
"""
COMPUTES = f"""{MEET}
def test_meets():
    meet("computes", "waits")
def test_passes():
    pass
def test_leaves_a_name():
    pathlib.Path("/dev/shm/test-lanes").touch()
    meet("left", "looked")
    os.unlink("/dev/shm/test-lanes")
"""
WAITS = f"""{MEET}
KEPT = sys.stderr  # as the default of a parameter, in a library that is imported now
def test_meets():
    meet("waits", "computes")
def test_sees_no_names_of_others():
    meet("looked", "left")
    assert os.geteuid() or not os.path.exists("/dev/shm/test-lanes")
def test_fails():
    print("before the failure")
    print("by the stderr of before", file=KEPT)
    assert 1 == 2
def test_skips():
    pytest.skip("NOT TESTED: no tiger here")
@pytest.mark.slow
def test_slow():
    assert False
"""
LEAVES = f"""{MEET}
@pytest.fixture(scope="module", autouse=True)
def _leaves(_no_leftovers):
    yield
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
def test_leaves():
    pass
"""
DIES = f"""{MEET}
def test_dies():
    os._exit(0)
def test_never():
    pass
"""
INTERRUPTED = f"""{MEET}
def test_endless():
    meet(pathlib.Path(__file__).stem, "never")
"""


def project(folder: Path, files: dict[str, str]) -> Path:
    """A project with these files of tests."""
    (folder / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['slow: asked for only']\ntimeout = 60\n"
        "addopts = \"--import-mode=importlib -m 'not slow'\"\n"
    )
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(TESTS / "conftest.py", folder)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(TESTS), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of pytest and what it says."""
    with start(folder, *arguments) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    return process.returncode, said


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of tests of both kinds, one of which ends its lane."""
    names = {"unit/test_computes.py": COMPUTES, "notebook/test_a.py": WAITS, "notebook/test_b.py": LEAVES}
    code, said = run(project(tmp_path_factory.mktemp("project"), {**names, "notebook/test_c.py": DIES}))
    assert code == 1
    return said


@pytest.mark.slow
def test_both_kinds_run_at_once_and_are_reported_as_one(report: str) -> None:
    assert "collected 11 items / 1 deselected / 10 selected" in report
    assert "before the failure" in report
    assert "by the stderr of before" in report
    assert "FAILED tests/notebook/test_a.py::test_fails - assert 1 == 2" in report
    assert re.search(r"SKIPPED \[1\] tests/notebook/test_a.py:\d+: NOT TESTED: no tiger here", report)
    assert "= 2 failed, 6 passed, 1 skipped, 1 deselected, 1 error in" in report.splitlines()[-1]


@pytest.mark.slow
def test_each_kind_looks_for_its_own_leftovers(report: str) -> None:
    said = [line for line in report.splitlines() if line.startswith("ERROR ")]
    assert len(said) == 1
    assert said[0].startswith("ERROR tests/notebook/test_b.py::test_leaves - AssertionError: process left behind")


@pytest.mark.slow
def test_a_lane_that_dies_is_a_failure(report: str) -> None:
    assert "FAILED tests/notebook/test_c.py::test_dies - this lane ended with code 0; 2 of its tests" in report


@pytest.mark.slow
def test_the_first_failure_ends_both(tmp_path: Path) -> None:
    fails = f"{MEET}\ndef test_fails():\n    meet('waits', 'test_endless')\n    assert False\n"
    code, said = run(project(tmp_path, {"unit/test_a.py": fails, "notebook/test_endless.py": INTERRUPTED}), "-x")
    assert code == 1
    assert "stopping after 1 failures" in said
    assert "= 1 failed in" in said.splitlines()[-1]


def test_one_kind_alone_needs_no_lane(tmp_path: Path) -> None:
    alone = "import os\ndef test_alone():\n    print('in process', os.getpid())\n"
    files = {"unit/test_a.py": COMPUTES, "notebook/test_b.py": alone}
    with start(project(tmp_path, files), "tests/notebook") as process:
        assert process.stdout is not None
        said = process.stdout.read()
    assert (process.returncode, f"in process {process.pid}\n" in said) == (0, True), said


@pytest.mark.slow
def test_an_interrupt_ends_all_lanes(tmp_path: Path) -> None:
    files = {"unit/test_a.py": INTERRUPTED, "notebook/test_b.py": INTERRUPTED, "hosts/test_c.py": INTERRUPTED}
    folder = project(tmp_path, files)
    with start(folder) as process:
        until(lambda: all((folder / name).exists() for name in ("test_a", "test_b", "test_c")))
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in said
    assert not [child for child in children if child.is_running()]
