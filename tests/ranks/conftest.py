"""Every test here runs inside ranks, at each size of SIZES (a file may set its own)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from ring_notebook.config import config
from ring_notebook.launch.rank import rank_in

SIZES = (1, 2, 3, 4)


# First, so that the names of tests do not depend on whether pytest was given this folder or one above it: a test is
# asked for by its name inside the ranks.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = getattr(metafunc.module, "SIZES", SIZES)
    metafunc.parametrize("size", sizes, indirect=True, ids=[f"np{size}" for size in sizes])


@pytest.fixture(autouse=True)
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks run this test together."""
    return int(request.param)


@pytest.fixture
def rank() -> int:
    """Which of them this process is."""
    return rank_in()


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
