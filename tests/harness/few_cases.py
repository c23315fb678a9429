"""The pytest plugin that marks as slow all but the last case of each test of processes: `make test` runs that one.

The last, because of two sizes it is the larger. `make test-all` and the tenths of CI run the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOMS = ("attack", "browser", "elastic", "hosts", "jobs", "native", "notebook", "ranks")
"""Folders whose tests start processes; others take milliseconds, or have a target of their own."""


# The conftest.py of a folder, which is loaded later, has marked its own choice before.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rooms = {Path(config.rootpath, "tests", name) for name in ROOMS}
    seen: set[str] = set()
    for item in reversed(items):
        if hasattr(item, "callspec") and not item.get_closest_marker("slow") and rooms.intersection(item.path.parents):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)
