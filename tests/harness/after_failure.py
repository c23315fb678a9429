"""The pytest plugin that cleans the clusters of a failed test's fixtures, so that the next test finds them idle.

Such a fixture is a `Cluster`, or a `Notebook` with one.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Clean before the test's own fixtures are torn down."""
    error = None
    if item.stash.get(_FAILED, False):
        try:
            for used in getattr(item, "funcargs", {}).values():
                clean(used)
        except Exception as raised:
            error = raised
    result = yield
    if error is not None:
        raise error
    return result


def clean(used: object) -> None:
    """If ``used`` is or has a cluster, end its runs and delete its variables; restart it if it is not idle."""
    try:
        from notebook.kernel import Notebook
        from ring_notebook.notebook.cluster.cluster import Cluster
    except ModuleNotFoundError:  # an environment without notebooks has no cluster either
        return

    if isinstance(used, Notebook):
        used.clean()
    elif isinstance(used, Cluster):
        for run in used.runs.in_progress:
            run.stop()
        if not used.running or [engine for engine in used.status() if engine.state != "idle"]:
            used.restart()
        used.run("%reset -f").wait()
