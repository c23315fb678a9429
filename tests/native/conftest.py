"""Test data lives as long as the test that made it, and lies in host memory or on devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from native.over_devices import is_slow, tensors_on_devices
from native.values import forget_samples


@pytest.fixture(autouse=True)
def _own_samples() -> Iterator[None]:
    """What a test that forks ranks holds, every one of them maps."""
    yield
    forget_samples()


@pytest.fixture(autouse=True)
def tensors_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the tensors of this test lie: `also_on_devices`."""
    with tensors_on_devices() if getattr(request, "param", "host") == "device" else nullcontext():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(item, "callspec") and is_slow(item.callspec.params):
            item.add_marker(pytest.mark.slow)
