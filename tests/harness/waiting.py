"""Waiting for a condition in a test, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], bool], limit: float = 45.0) -> None:
    """Return when ``condition()`` is true; fail when it still is not after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit:g} s"
        time.sleep(0.005)
