"""Waits in tests: for a condition, with a limit; for text; and in a program of a test for a signal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SLEEPS", "stderr_into", "until"]

SLEEPS = "while True: __import__('time').sleep(0.05)"
"""A line of Python that waits for a signal.

One long sleep may miss it: Python only notes a signal that arrives just before the system call begins, and sleeps on.
"""


def until(condition: Callable[[], bool], limit: float = 45.0) -> None:
    """Return when ``condition()`` is true; fail if it is not after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit:g} s"
        time.sleep(0.005)


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """In the block standard error goes to ``path``, where a test can read it; capfd loses text while it reads."""
    before = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
