"""Every test here runs inside ranks: alone and as three ranks, unless its mark `sizes` says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from ring_notebook.rank.rank_status import rank_of_process

USUAL = pytest.mark.sizes(1, 3, slow=(2, 4)).mark
"""Alone, where nothing is sent, and the fewest ranks of which none is like another: a first, a middle and a last one,
with data that they cannot share evenly. When asked for slow tests, it runs at two and four too."""


# First, so that the names of tests do not depend on whether pytest was given this folder or one above it: a test is
# asked for by its name inside the ranks.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("sizes") or USUAL
    slow = mark.kwargs.get("slow", ())
    sizes = [pytest.param(size, id=f"np{size}", marks=[pytest.mark.slow] * (size in slow))
             for size in sorted((*mark.args, *slow))]  # fmt: skip
    metafunc.parametrize("size", sizes, indirect=True)


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
