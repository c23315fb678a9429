"""A failed test leaves the next one a cluster and a kernel that are idle, whatever it left in progress."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs.harness.test_lanes import TESTS, project, run

FAIL = """
from harness.waiting import until

def test_fails_during_a_run(cluster):
    run = cluster.run("kept = 1\\nimport time\\nwhile True: time.sleep(0.05)")
    until(lambda: [one.line for one in run.log.statuses().values()] == [3, 3])
    assert run.done

def test_after_it(cluster):
    assert [engine.state for engine in cluster.status()] == ["idle", "idle"]
    cluster.run("assert 'kept' not in globals()\\nring.barrier()").wait()

def test_fails_during_a_run_of_a_kernel(notebook):
    notebook.run("%%ringtrain --background\\nkept = 1\\nimport time\\nwhile True: time.sleep(0.05)")
    assert False

def test_after_that(notebook):
    assert "there" in notebook.text("%%ringtrain\\nassert 'kept' not in globals()\\nprint('there')")
"""


@pytest.mark.slow
def test_the_next_test_finds_a_clean_cluster(tmp_path: Path) -> None:
    folder = project(tmp_path, {"notebook/test_a.py": FAIL})
    shutil.copy(TESTS / "notebook" / "conftest.py", folder / "tests" / "notebook")
    _, said = run(folder, "-W", "ignore")
    assert "= 2 failed, 2 passed in" in said.splitlines()[-1], said
    assert "PASSED tests/notebook/test_a.py::test_after_it" in said
    assert "PASSED tests/notebook/test_a.py::test_after_that" in said
