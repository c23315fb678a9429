"""The pytest plugin that chooses among the cases of each test that starts processes.

Of cases that do not mark themselves, `make test` runs the last, usually the larger of two sizes; the others become
slow. Of the slow cases only those run that try a value of some parameter for the first time. A case that is requested
by name runs.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

ROOMS = ("attack", "browser", "elastic", "hosts", "jobs", "native", "notebook", "ranks")
"""Folders whose tests start processes; others take milliseconds, or have a target of their own."""


# The conftest.py of a folder, which is loaded later, has marked its own choice before.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rooms = {Path(config.rootpath, "tests", name) for name in ROOMS}
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and rooms.intersection(item.path.parents):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for of_one in cases.values():
        for item in [item for item in of_one if not _is_slow(item)][:-1]:
            item.add_marker(pytest.mark.slow)
        left_out.update(_tried_already(of_one))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _tried_already(cases: list[pytest.Function]) -> set[pytest.Function]:
    """The slow cases whose values other cases already try, in pseudorandom order so that values are combined."""
    tried: set[tuple[int, str]] = set()
    found = set()
    for item in sorted(cases, key=lambda item: (_is_slow(item), crc32(item.nodeid.encode()))):
        values = {*enumerate(item.callspec._idlist)}
        if _is_slow(item) and values <= tried:
            found.add(item)
        tried |= values
    return found
