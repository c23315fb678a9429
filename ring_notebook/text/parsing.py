"""Parsing Python text while other threads may parse too."""

from __future__ import annotations

import ast
from threading import Lock
from time import sleep

_ATTEMPTS = 20
_PAUSE = 0.001  # seconds, doubled after each attempt up to a tenth of a second

_one_at_a_time = Lock()


def parse(text: str, file: str = "<unknown>") -> ast.Module:
    """The tree of ``text``; raises SyntaxError, which names ``file``.

    Python 3.11 has one count of depth for all threads: where two parse at once, one of them gets SystemError ("AST
    constructor recursion depth mismatch", python/cpython issue 106905), whatever its text. Our threads parse one at a
    time, and try again if a foreign thread was in the way.
    """
    for attempt in range(_ATTEMPTS):
        try:
            with _one_at_a_time:
                return ast.parse(text, file)
        except SystemError:
            sleep(min(_PAUSE * 2**attempt, 0.1))
    return ast.parse(text, file)
