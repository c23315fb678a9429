"""The default process group that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ring_notebook.torch as hvd


@pytest.fixture
def group() -> Iterator[Any]:
    """A new default group on backend "ring" for each test."""
    hvd.init()
    yield hvd.process_group()
    hvd.shutdown()
