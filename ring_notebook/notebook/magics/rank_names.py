"""Names of the ranks in the notebook: completion, help, ``ring`` in its own cells, and advice on a NameError.

Completion also knows the commands and options of the magics.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.errors import RingError
from ring_notebook.frameworks import default
from ring_notebook.notebook.magics import options
from ring_notebook.notebook.magics.cells import runs_on_ranks
from ring_notebook.notebook.magics.session import Session
from ring_notebook.notebook.run import catalogue

_CELL = re.compile(r"\s*%%ring(train|scale)\b.*\n")  # the lines after it run on the ranks
_SET = re.compile(r"\s*%ring\s+set\s")
_PULL = re.compile(r"\s*%ring\s+pull\s")
_RUN = re.compile(r"\s*%ring\s+(runs\s+(?:compare|output|tag|note|delete)\s|(?:export|plot)\s+\S+\s+)")
_NAME = re.compile(r"[^\W\d]\w*(\.\w*)*$")


def register(shell: InteractiveShell, session: Session) -> None:
    """Let ``shell`` complete and explain names of the ranks, and bind ``ring`` where the user has not."""
    _complete(shell, session)
    _inspect(shell, session)
    _advise_on_missing(shell, session)
    if "ring" not in shell.user_ns:
        shell.push({"ring": _Ring()}, interactive=False)


class _Ring:
    """``ring`` in cells of the notebook itself: its names have their help and signatures, and cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._face(), name)
        return _refusing(name, value) if callable(value) and not isinstance(value, type) else value

    def __dir__(self) -> list[str]:
        return list(self._face().__all__)

    def __repr__(self) -> str:
        return "<ring: for cells that begin with %%ringtrain>"

    def _face(self) -> Any:
        try:
            return import_module(default().face)
        except ImportError as error:  # of the framework, which engines may have
            raise AttributeError(f"ring is for cells that begin with %%ringtrain ({error})") from error


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise RingError(
            f"ring.{name}() runs on the ranks, and this cell runs in the notebook; put %%ringtrain on its first line"
        )

    return refuse


def _inspect(shell: InteractiveShell, session: Session) -> None:
    """Have ``shell`` ask rank 0 for the help on a name that it does not know itself."""
    own: Callable[..., dict[str, str]] = shell.object_inspect_mime

    def inspect(oname: str, *args: Any, **kwargs: Any) -> dict[str, str]:
        try:
            return own(oname, *args, **kwargs)
        except KeyError:
            if text := session.help(oname):
                # Without HTML, which it takes out for most front ends, the kernel says that nothing is found.
                return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
            raise

    shell.object_inspect_mime = inspect  # type: ignore[method-assign]


def _advise_on_missing(shell: InteractiveShell, session: Session) -> None:
    """Have NameErrors of ``shell`` for a variable that the ranks have say how to bring it here."""

    def show(
        shell: InteractiveShell,
        kind: type[BaseException],
        error: NameError,
        traceback: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        if error.name and error.name in session.names():
            error.args = (f"{error}; the ranks have it: `%ring pull {error.name}` brings it here",)
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

    shell.set_custom_exc((NameError,), show)


def _complete(shell: InteractiveShell, session: Session) -> None:
    """Add the options of the magics and the names of the ranks to the completer of ``shell``."""

    def complete_ring(context: CompletionContext) -> dict[str, object]:
        line, token = context.text_until_cursor, context.token
        words = options.completions(line.lstrip())
        if _RUN.match(line):
            words += [name for name in catalogue.names() if name.startswith(token)]
        if _SET.match(line):
            words += [f"{name}=" for name in session.knob_names() if name.startswith(token)]
        pull = _PULL.match(line) is not None
        on_ranks = _in_cell(context) or (session.default and runs_on_ranks(context.full_text))
        of_ring = token.startswith("ring.") and isinstance(shell.user_ns.get("ring"), _Ring)
        ranks = (pull and not token) or (_NAME.match(token) and (pull or on_ranks or of_ring))
        names = _names(session, token) if ranks else []
        return {
            "completions": [
                *(SimpleCompletion(word, type="option") for word in words),
                *(SimpleCompletion(name, type="rank") for name in names),
            ],
            # A name of this notebook makes no sense there. Behind a dot it is the same name once more, and the first
            # one of `ring` would import its framework, for longer than a front end waits.
            "suppress": bool(words) or pull or (bool(names) and "." in token),
        }

    complete_ring.matcher_api_version = 2  # type: ignore[attr-defined]
    shell.Completer.custom_matchers.append(complete_ring)


def _in_cell(context: CompletionContext) -> bool:
    before = context.full_text.split("\n")[: context.cursor_line]
    return _CELL.match("\n".join([*before, ""])) is not None


def _names(session: Session, token: str) -> list[str]:
    """The names on the ranks that begin with ``token``, a name or a path of names with dots."""
    path, dot, begun = token.rpartition(".")
    names = session.names(path)
    shown = names if begun.startswith("_") else [name for name in names if not name.startswith("_")]
    return [f"{path}{dot}{name}" for name in shown if name.startswith(begun)]
