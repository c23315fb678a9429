"""Questions of a rank to its user, from `input()` or a debugger. The notebook shows them and sends the answers."""

from __future__ import annotations

import builtins
import getpass
import io
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Literal

from ring_notebook.core import world
from ring_notebook.core.native import core
from ring_notebook.protocol.question import Question
from ring_notebook.text.error_text import printable

_MOST_TEXT = 100_000  # characters shown before a prompt
_numbers = itertools.count(1)
_answers: SimpleQueue[tuple[int, str | None, str]] = SimpleQueue()
_process = 0  # this engine's; not set at import, because engines may be forked later
_send: Callable[[Question], None] | None = None  # to the notebook, while a cell runs
_said = Question(0)  # the last question that was sent


class Listening:
    """A context in which questions of this rank go to the notebook through ``send``."""

    # Not a generator: contextlib sets attributes of the cell's exception, which may refuse that.
    def __init__(self, send: Callable[[Question], None]) -> None:
        self._own = send

    def __enter__(self) -> None:
        global _send, _said
        _said = Question(next(_numbers))
        _send = self._own

    def __exit__(self, *_: object) -> None:
        global _send
        _send = None
        hold(False)  # the kernel may have died and cannot release the hold


def _say(question: Question, send: Callable[[Question], None]) -> None:
    global _said
    _said = question
    send(question)


def ask(prompt: str, *, text: str = "", kind: Literal["input", "password", "pdb"] = "input") -> str:
    """The user's answer, one line without its newline; ``text`` is shown before the prompt. An interrupt ends the wait.

    Raises EOFError when the user ended the input, and io.UnsupportedOperation where no answer is possible: no cell
    runs, the front end cannot ask, or the caller is another thread or a process that this rank has forked.
    """
    send, number = _send, next(_numbers)
    if send is None or os.getpid() != _process or threading.current_thread() is not threading.main_thread():
        raise io.UnsupportedOperation(f"{_who()}: only the main thread of a rank whose cell runs can ask {prompt!r}")
    _say(Question(number, printable(prompt), printable(text, _MOST_TEXT), kind, held=True), send)
    try:
        answered, line, trouble = 0, None, ""
        while answered != number:  # a late answer to an interrupted question may come first
            answered, line, trouble = _answers.get()
    finally:
        # pdb now executes the command; then another question follows, or `release`.
        _say(Question(number, held=kind == "pdb"), send)
    if trouble:
        raise io.UnsupportedOperation(f"{_who()}: {prompt!r} has no answer: {trouble}")
    if line is None:
        raise EOFError
    return line


@contextmanager
def no_questions() -> Iterator[None]:
    """A context in which `ask` raises io.UnsupportedOperation."""
    global _send
    own, _send = _send, None
    try:
        yield
    finally:
        _send = own


def release() -> None:
    """Start the run's time limits again: this rank is no longer debugged."""
    if _send is not None:
        _say(Question(next(_numbers)), _send)


def pause(paused: bool) -> None:
    """Stop the run's time limits while the run is paused; ``paused=False`` starts them."""
    if _send is not None:
        _say(Question(next(_numbers), held=paused), _send)


def state() -> str:
    """The last question of this rank, or an empty one, for a kernel that has attached since."""
    return _said.encode()


def hold(held: bool) -> None:
    """Stop the time limits of collectives on this rank while another rank is debugged; ``held=False`` starts them."""
    core.hold_deadlines(held)


def answer(number: int, line: str | None, trouble: str) -> None:
    """Answer question ``number``. None ends the input; ``trouble`` says why no answer is possible."""
    _answers.put((number, line, trouble))


def _who() -> str:
    return f"rank {world.current().rank if world.is_initialized() else world.prepare_host().topology.rank}"


def install() -> None:
    """Make `input`, `getpass.getpass` and reading lines from sys.stdin ask the user of the notebook."""
    global _process
    _process = os.getpid()
    builtins.input = _input
    getpass.getpass = _getpass
    sys.stdin = _Input()


def _input(prompt: object = "", /) -> str:
    return ask(str(prompt))


def _getpass(prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
    return ask(prompt, kind="password")


class _Input(io.TextIOBase):
    """sys.stdin of a rank: each line of it is an answer of the user."""

    encoding = "utf-8"
    name = "<stdin>"

    def readable(self) -> bool:
        return True

    def read(self, _size: int | None = -1, /) -> str:
        raise io.UnsupportedOperation(f"{_who()}: sys.stdin has no end here; read a line, or call input()")

    def readline(self, _size: int = -1, /) -> str:  # type: ignore[override]
        try:
            return ask("") + "\n"
        except EOFError:
            return ""
