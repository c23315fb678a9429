"""Captures what a rank prints during a run, as deltas."""

from __future__ import annotations

import io
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from ring_notebook.records import Output

__all__ = ["Capture"]

_Stream = Literal["stdout", "stderr"]


class _Writer(io.TextIOBase):
    """A text stream that keeps what is written for the publisher."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, stream: _Stream, pieces: deque[tuple[_Stream, str]]) -> None:
        self.name = f"<{stream}>"
        self._stream: _Stream = stream
        self._pieces = pieces
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._process:
            # A forked data loader worker: its copy of the deque goes nowhere, the engine's log does.
            return _original(self._stream).write(text)
        self._pieces.append((self._stream, text))
        return len(text)


def _original(stream: _Stream) -> TextIO:
    original = sys.__stdout__ if stream == "stdout" else sys.__stderr__
    assert original is not None
    return original


class Capture:
    """What the rank has printed since it was last drained."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[_Stream, str]] = deque()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block sys.stdout and sys.stderr write here."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Writer("stdout", self._pieces), _Writer("stderr", self._pieces)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before

    def drain(self, run: str, rank: int) -> list[Output]:
        """Take what was printed, one Output per change of stream. Callable from any thread."""
        outputs: list[tuple[_Stream, list[str]]] = []
        for _ in range(len(self._pieces)):
            stream, text = self._pieces.popleft()
            if not outputs or outputs[-1][0] != stream:
                outputs.append((stream, []))
            outputs[-1][1].append(text)
        return [Output(run, rank, stream, "".join(texts)) for stream, texts in outputs]
