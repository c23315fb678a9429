"""Captures what a rank prints, displays and draws during a run, in order, with what is written below Python."""

from __future__ import annotations

import io
import json
import os
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from typing import Any, TextIO

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine import descriptors, late_output
from ring_notebook.engine.descriptors import Stream
from ring_notebook.protocol.records import Cleared, Display, Output
from ring_notebook.text.error_text import printable

Piece = Output | Display | Cleared


# Characters of one Output: the kernel holds several copies of a record while it reads it.
MOST_TEXT = 250_000


LATE = "Written between this cell and the one before:"

_current: Capture | None = None  # of the present run
_process = 0  # this engine's; not set at import, because engines may be forked later


class Capture:
    """The output of the rank since the last `drain`. Any thread may add to it and drain it."""

    def __init__(self, run: str, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._pieces: deque[Piece] = deque()
        self._clears_next = False  # the next piece replaces all before it

    @contextmanager
    def active(self, shell: InteractiveShell) -> Iterator[None]:
        """A context that captures sys.stdout, sys.stderr, ``display`` and IPython's own output."""
        global _current
        before, streams, publisher = _current, (sys.stdout, sys.stderr), shell.display_pub
        redirect()
        between = late_output.cell_begins()
        _current = self
        self._show_late(between)
        shell.display_pub = _Publisher(self)
        # When an object's display raises, IPython shows the traceback and continues. An engine's shell would send it to
        # a client that does not show it.
        shell._showtraceback = _show_traceback  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del shell._showtraceback
            shell.display_pub = publisher
            _current = before
            sys.stdout, sys.stderr = streams
            late_output.cell_ends(self._run)

    def _show_late(self, between: list[tuple[Stream, str]]) -> None:
        """Add what threads and children of earlier cells have written, and no notebook has asked for."""
        for stream, text in between:
            self.write(stream, f"{LATE}\n{text if text.endswith(chr(10)) else text + chr(10)}")

    def write(self, stream: Stream, text: str) -> None:
        self._add(Output(self._run, self._rank, stream, text))

    def show(self, data: dict[str, Any], metadata: dict[str, Any], name: str = "", update: bool = False) -> None:
        """Add a MIME bundle. If it has only text it is added as printed text, unless a later display may replace it."""
        if data.keys() == {"text/plain"} and not name:
            self.write("stdout", data["text/plain"] + "\n")
        elif data:
            self._add(Display(self._run, self._rank, data, metadata, name, update))

    def clear(self, wait: bool) -> None:
        """Remove what was printed and shown: at once, or with ``wait`` when new output comes."""
        self._clears_next = wait
        if not wait:
            self._pieces.append(Cleared(self._run, self._rank))

    def _add(self, piece: Piece) -> None:
        self._take_descriptors()  # first, because it was written before this piece
        self._append(piece)

    def _take_descriptors(self) -> None:
        with closing(descriptors.take()) as found:
            for stream, text in found:
                for line in text.splitlines(keepends=True):  # of many calls, unlike that of one print
                    self._append(Output(self._run, self._rank, stream, line))

    def _append(self, piece: Piece) -> None:
        if self._clears_next:
            self._clears_next = False
            self._pieces.append(Cleared(self._run, self._rank))
        self._pieces.append(piece)

    def drain(self) -> list[Piece]:
        """Take all pieces: text joined up to a change of stream, displays without those that were replaced."""
        self._take_descriptors()
        taken = [self._pieces.popleft() for _ in range(len(self._pieces))]
        pieces: list[Piece] = []
        for stream, group in groupby(_not_replaced(taken), key=lambda piece: getattr(piece, "stream", None)):
            if stream is None:
                pieces += group
            else:
                for text, block in _blocks(piece.text for piece in group if isinstance(piece, Output)):
                    parts = (text[start : start + MOST_TEXT] for start in range(0, len(text), MOST_TEXT))
                    shown = (printable(part, MOST_TEXT) for part in parts)
                    pieces += (Output(self._run, self._rank, stream, part, block) for part in shown)
        return pieces


def _blocks(written: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of text to show: the lines of one print, with True, and all other text joined."""
    joined = ""
    block = ""
    for text in written:
        if block:  # print writes the last newline in a call of its own
            block += "\n" * (text == "\n")
            yield block, block.endswith("\n")
            block, text = "", "" if text == "\n" else text
        if _is_block(text) and (not joined or joined.endswith("\n")):
            if joined:
                yield joined, False
            joined, block = "", text
        else:
            joined += text
    if block or joined:
        yield block or joined, block.endswith("\n")


def _is_block(text: str) -> bool:
    """Whether the text has several lines, and is not a progress bar, which moves the cursor."""
    return "\n" in text[:-1] and "\r" not in text and "\x1b[" not in text


def _not_replaced(pieces: list[Piece]) -> list[Piece]:
    """The pieces without displays that a later piece updates or removes: a plot that is drawn a hundred times a second
    is shown five times. Text stays in the record.
    """
    kept: list[Piece] = []
    updated: set[str] = set()
    cleared = False
    for piece in reversed(pieces):
        if isinstance(piece, Display):
            if cleared or (piece.update and piece.id in updated):
                continue
            if piece.update:
                updated.add(piece.id)
        cleared = cleared or isinstance(piece, Cleared)
        kept.append(piece)
    return kept[::-1]


def _show_traceback(_kind: Any, _error: Any, lines: list[str]) -> None:
    sys.stderr.write("\n".join(lines) + "\n")


class _Publisher(DisplayPublisher):
    """The publisher that ``display``, ``update_display`` and ``clear_output`` call."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *_: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_more: Any,
    ) -> None:
        name = str((transient or {}).get("display_id") or "")
        self._capture.show(*portable(data, metadata or {}), name, update)

    def clear_output(self, wait: bool = False) -> None:
        self._capture.clear(wait)


class _Writer(io.TextIOBase):
    """A text stream for all runs of this engine: writes to the present run, and between runs to its descriptor."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, stream: Stream) -> None:
        self.name = f"<{stream}>"
        self._stream: Stream = stream

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        capture = _current  # read once: the run may end while another thread writes
        if os.getpid() != _process:  # in a forked data loader worker the capture is a copy that is never sent
            capture = None
        elif late_output.add(self._stream, text):
            return len(text)
        if capture is None:
            print(text, end="", file=self._log(), flush=True)
        else:
            capture.write(self._stream, text)
        return len(text)

    def fileno(self) -> int:
        """The descriptor that processes inherit which the cell starts."""
        return self._log().fileno()

    def close(self) -> None:
        """Does nothing: later cells write here too."""

    def _log(self) -> TextIO:
        log = sys.__stdout__ if self._stream == "stdout" else sys.__stderr__
        assert log is not None
        return log


# The same streams in all runs: a logging handler keeps the stream of the cell that made it.
_streams = _Writer("stdout"), _Writer("stderr")


def redirect() -> None:
    """From now on, send text that this process writes to sys.stdout and sys.stderr to the present run."""
    global _process
    _process = os.getpid()
    sys.stdout, sys.stderr = _streams


# This does not import matplotlib. IPython has the backend that draws for notebooks; a cell's first figure loads it.
_BACKEND = "matplotlib_inline.backend_inline"


def prepare_figures() -> None:
    """Choose the backend for notebooks, unless the user has chosen one. Call it before a cell is executed."""
    os.environ.setdefault("MPLBACKEND", f"module://{_BACKEND}")


def show_figures() -> None:
    """Show the figures that the cell has drawn but not shown, and close them, as a notebook does after a cell."""
    if _BACKEND in sys.modules:
        sys.modules[_BACKEND].flush_figures()


# A widget's model is in this engine, which has no connection to the page.
_WIDGET = "application/vnd.jupyter.widget-view+json"


_ADVICE = (
    "{}: widgets work in the notebook's own process only; make it in a cell without %%ringtrain (or with %%local), and "
    "`%ring push` its value to the ranks"
)


def portable(data: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``data`` and ``metadata`` with strings and JSON as values. A value that is not JSON becomes its ``str``.

    A widget is replaced by a line of text that says what to do.
    """
    if _WIDGET in data:
        return {"text/plain": _ADVICE.format(str(data.get("text/plain", "a widget")).partition("(")[0])}, {}
    return {mime: _value(value) for mime, value in data.items()}, _value(metadata)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=str))
