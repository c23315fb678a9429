"""Every test here runs inside ranks: alone and as three ranks, unless its mark `sizes` says otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest

from harness.protocol import FOLDER
from ring_notebook.config import config
from ring_notebook.rank.rank_status import rank_of_process

USUAL = pytest.mark.sizes(1, 3, slow=(2, 4)).mark
"""Alone, where nothing is sent, and the fewest ranks of which none is like another: a first, a middle and a last one,
with data that they cannot share evenly. A test runs at two and four ranks too when asked for slow tests."""

MANY = 8
"""From so many cases on, a test tries each at one of its slow sizes, and not at all of them."""


# First, so that the names of tests do not depend on whether pytest was given this folder or one above it: a test is
# asked for by its name inside the ranks.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("sizes") or USUAL
    slow = mark.kwargs.get("slow", ())
    sizes = [pytest.param(size, id=f"np{size}", marks=[pytest.mark.slow] * (size in slow))
             for size in sorted((*mark.args, *slow))]  # fmt: skip
    metafunc.parametrize("size", sizes, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that runs on several ranks too tries the first of its parameters alone; the others are slow there."""
    tried: set[tuple[Path, str]] = set()
    for item in items:
        if Path(__file__).parent not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        if item.callspec.params["size"] == 1 and {*(item.get_closest_marker("sizes") or USUAL).args} != {1}:
            test = (item.path, item.originalname)
            if test in tried:
                item.add_marker(pytest.mark.slow)
            tried.add(test)
    if FOLDER not in os.environ:  # in ranks, what was chosen runs
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of tests with many cases: each runs at the sizes that are not slow, and at one slow size, by its name."""
    slow: dict[tuple[Path, str], dict[str, list[pytest.Function]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents:
            case = item.nodeid.replace(f"np{item.callspec.params['size']}", "np")
            cases = slow.setdefault((item.path, item.originalname), {}).setdefault(case, [])
            if item.get_closest_marker("slow"):
                cases.append(item)
    return {
        item
        for cases in slow.values()
        if len(cases) >= MANY
        for case, sizes in cases.items()
        for at, item in enumerate(sizes)
        if at != crc32(case.encode()) % len(sizes)
    }


@pytest.fixture(autouse=True)
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks run this test together."""
    return int(request.param)


@pytest.fixture
def rank() -> int:
    """Which of them this process is."""
    return rank_of_process()


@pytest.fixture
def hvd() -> Iterator[ModuleType]:
    """``ring_notebook.torch``, initialised for this test alone."""
    import ring_notebook.torch

    ring_notebook.torch.init()
    yield ring_notebook.torch
    ring_notebook.torch.shutdown()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets RING_* variables for this test: ``settings(overlap="thread")``."""

    def change(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"RING_{name.upper()}", str(value))
        config.cache_clear()

    yield change
    config.cache_clear()
