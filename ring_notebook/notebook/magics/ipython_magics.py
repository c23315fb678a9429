"""`%ring`, `%%ringtrain` and `%%ringscale`: parse their lines, then call their actions."""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
from collections.abc import Callable
from functools import wraps
from shutil import which
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Command
from ring_notebook.notebook.magics import completion
from ring_notebook.notebook.magics.commands import MAGICS, RING
from ring_notebook.notebook.magics.commands.ring_attach import left_behind
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.session.cells import DefaultCells
from ring_notebook.notebook.session.session import Session

F = TypeVar("F", bound=Callable[..., Any])

_ASKS_FOR_HELP = re.compile(r"%%ring(train|scale)\s(.*\s)?(-h|--help)\s*$")


def _magic(method: F) -> F:
    """Show our own errors, file errors and interrupts as one line, without a traceback; its help is the docstring."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (RingError, OSError, KeyboardInterrupt) as error:
            if not hasattr(error, "_render_traceback_"):
                brief(error, f"{type(error).__name__}: {str(error) or 'interrupted'}")
            raise

    wrapped.__doc__ = MAGICS[method.__name__].help()
    return wrapped  # type: ignore[return-value]


@magics_class
class RingMagics(Magics):
    """The magics of one notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._session = session
        self._told: set[str] = set()

    @cell_magic
    @_magic
    def ringtrain(self, line: str, cell: str) -> Any:
        return self._call(MAGICS["ringtrain"], _words(line), cell=cell, cell_id=self._cell_id())

    @cell_magic
    @_magic
    def ringscale(self, line: str, cell: str) -> Any:
        return self._call(MAGICS["ringscale"], _words(line), cell=cell)

    @line_magic
    @_magic
    def ring(self, line: str) -> Any:
        words, renamed = RING.renamed(_words(line))
        if renamed and renamed not in self._told:
            self._told.add(renamed)
            print(renamed)  # noqa: T201
        if words[:1] in (["help"], ["-h"], ["--help"]):
            if other := MAGICS.get("".join(words[1:]).lstrip("%")):
                return self._call(other, ["--help"])
            words = [*words[1:], "--help"] if words[1:] else []
        return self._call(*RING.find(words))

    def _call(self, command: Command[..., Any], words: list[str], **more: Any) -> Any:
        given = command.parse(words)
        answer = None if given is None else command(self._session, **more, **given)
        if not isinstance(answer, str):  # a table, say, which the notebook shows
            return answer
        if answer:
            print(answer)  # noqa: T201
        return None

    def _cell_id(self) -> str:
        """The id of the cell that is executed; empty if the front end does not send it."""
        parent: dict[str, Any] = getattr(self.shell, "get_parent", dict)()
        return str(parent.get("metadata", {}).get("cellId", ""))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{error}: {line}") from None


def register(shell: InteractiveShell) -> None:
    """Register the magics in ``shell``, once."""
    if "ringtrain" not in shell.magics_manager.magics["cell"]:
        session = Session.of_kernel = Session(shell.user_ns)
        shell.register_magics(RingMagics(shell, session))
        completion.register(shell, session)
        default_cells = DefaultCells(shell, lambda: session.default)
        shell.input_transformers_cleanup.extend([_with_a_body, default_cells])
        if left := left_behind():
            print(left)  # noqa: T201
        # A kernel often runs without its environment being activated: then `!ringrun` would not be found.
        scripts = sysconfig.get_path("scripts")
        if which("ringrun") is None and which("ringrun", path=scripts):
            os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])


def _with_a_body(lines: list[str]) -> list[str]:
    """Give a cell that only asks for help a body: IPython refuses to call a cell magic without one."""
    return [*lines, "\n"] if len(lines) == 1 and _ASKS_FOR_HELP.match(lines[0]) else lines
