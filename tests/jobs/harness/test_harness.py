"""The harness that runs tests inside ranks: what it says of tests that fail, hang or die on one rank."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from harness.programs import ran

TESTS = Path(__file__).parents[2]
FILE = """
import os, signal, time
import pytest
pytestmark = pytest.mark.sizes(1, 2)

def test_equal(size, rank):
    assert 0 <= rank < size

def test_fails_on_one(rank):
    print("rank", rank, "was here")
    assert rank != 1

@pytest.mark.timeout(1)
def test_sleeps_on_one(rank):
    time.sleep(60 * rank)

@pytest.mark.timeout(1)
def test_deaf_on_one(rank):
    if rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)

def test_dies_on_one(rank):
    if rank == 1:
        os._exit(3)

def test_skips():
    pytest.skip("for a reason")

@pytest.mark.sizes(1, slow=(2,))
def test_slow(size):
    assert size in (1, 2)

@pytest.mark.parametrize("word", ["a", "b"])
def test_last(word):
    assert word in "ab"
"""

AROUND = """
import time
import pytest

@pytest.mark.timeout(1)
def test_waits_behind_its_limit():
    try:
        time.sleep(600)
    finally:
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of FILE in a project of its own."""
    root = tmp_path_factory.mktemp("project")
    ranks = root / "tests" / "ranks"
    ranks.mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib -m \"not slow\"'\n"
    )
    shutil.copy(TESTS / "conftest.py", root)
    shutil.copy(TESTS / "ranks" / "conftest.py", ranks)
    (ranks / "test_file.py").write_text(FILE)
    (root / "tests" / "test_around.py").write_text(AROUND)
    done = ran(
        [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", "-m", "slow or not slow", "tests"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        timeout=250,
    )
    return done.stdout + done.stderr


def test_a_test_passes_when_all_ranks_pass(report: str) -> None:
    for test in "test_equal[np1]", "test_equal[np2]", "test_fails_on_one[np1]", "test_last[np2-b]", "test_slow[np2]":
        assert f"{test} PASSED" in report, report


def test_a_wait_behind_the_time_limit_ends_too(report: str) -> None:
    assert "test_waits_behind_its_limit FAILED" in report, report


def test_a_test_fails_with_the_output_of_the_rank_that_failed(report: str) -> None:
    assert "test_fails_on_one[np2] FAILED" in report
    assert "===== rank 1 of 2, in call:" in report
    assert "rank 1 was here" in report
    assert "rank 0 was here" not in report


def test_a_slow_test_fails_at_its_line_and_the_ranks_go_on(report: str) -> None:
    assert "test_sleeps_on_one[np2] FAILED" in report
    assert "Timeout (>1.0s)" in report


def test_a_test_that_cannot_be_interrupted_is_killed_with_its_stacks(report: str) -> None:
    assert "test_deaf_on_one[np2] FAILED" in report
    assert "ranks [1] did not finish within 1 s" in report
    stacks = report.split("--- stacks of rank 1")[1]
    assert "in test_deaf_on_one" in stacks.split("--- end of the output")[0]


def test_a_test_whose_rank_dies_fails_and_the_rest_still_run(report: str) -> None:
    assert "test_dies_on_one[np2] FAILED" in report
    assert "the ranks ended before ranks [1] had finished the test" in report
    assert "test_skips[np2] SKIPPED (for a reason)" in report
    assert "5 failed" in report
