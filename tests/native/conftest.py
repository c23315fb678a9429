"""Test data lives as long as the test that made it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native.values import forget_samples


@pytest.fixture(autouse=True)
def _own_samples() -> Iterator[None]:
    """What a test that forks ranks holds, every one of them maps."""
    yield
    forget_samples()
