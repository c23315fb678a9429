"""The process groups that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import ring_notebook.torch as hvd


@pytest.fixture
def group() -> Iterator[Any]:
    """A new default group on backend "ring" for each test."""
    hvd.init()
    yield hvd.process_group()
    hvd.shutdown()


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[Any, Any]]:
    """The default group, which is ours, and one of Gloo beside it, for all tests of a module."""
    hvd.init()
    ring = hvd.process_group()
    assert dist.get_backend() == "ring"
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    yield ring, gloo
    dist.destroy_process_group()
    hvd.shutdown()
