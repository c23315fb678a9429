"""Waiting for a condition in a test, with an end, and for a signal in a program of a test."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SLEEPS", "until"]

SLEEPS = "while True: __import__('time').sleep(0.05)"
"""A line of Python that waits for a signal.

One long sleep may miss it: Python only notes a signal that arrives just before the system call begins, and sleeps on.
"""


def until(condition: Callable[[], bool], limit: float = 45.0) -> None:
    """Return when ``condition()`` is true; fail when it still is not after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit:g} s"
        time.sleep(0.005)
