"""Waits in tests: for a condition, with a limit; for text; and for a signal, in a program of a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

__all__ = ["LIMIT", "SLEEPS", "stderr_into", "until"]

LIMIT = 200.0
"""Seconds after which a wait counts as hung, on a busy machine too."""

SLEEPS = "while True: __import__('time').sleep(0.05)"
"""A line of Python that waits for a signal.

One long sleep may miss it: Python only notes a signal that arrives just before the system call begins, and sleeps on.
"""


T = TypeVar("T")


def until(condition: Callable[[], T], limit: float = LIMIT, why: Callable[[], object] = str) -> T:
    """The first true result of ``condition()``; fails after ``limit`` seconds, with ``why()``."""
    deadline, pause = time.monotonic() + limit, 0.005
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {limit:g} s: {why()}"
        time.sleep(pause)
        pause = min(0.2, 1.1 * pause)
    return found


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
