"""The pytest plugin that marks as slow all but a few cases of each test of processes: `make test` runs those few.

The first and the last of its parameters: `make test-all` and the tenths of CI run the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["few"]

CASES = 2
"""Of each test."""
ROOMS = ("attack", "browser", "elastic", "hosts", "jobs", "native", "notebook", "ranks")
"""Folders whose tests start processes; others take milliseconds, or have a target of their own."""


def few(count: int) -> set[int]:
    """The places of the cases that run, of so many."""
    return {round(at * (count - 1) / (CASES - 1)) for at in range(CASES)}


# The conftest.py of a folder, which is loaded later, has marked its own choice before.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rooms = {Path(config.rootpath, "tests", name) for name in ROOMS}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow") and rooms.intersection(item.path.parents):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        chosen = few(len(of_one))
        for at, item in enumerate(of_one):
            if at not in chosen:
                item.add_marker(pytest.mark.slow)
