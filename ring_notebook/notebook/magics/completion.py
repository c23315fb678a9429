"""Tab completion: commands and options of the magics, and names of the ranks in cells that run on them."""

from __future__ import annotations

import re

from IPython.core.completer import CompletionContext, SimpleCompletion
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.notebook.magics import options
from ring_notebook.notebook.magics.default_cells import runs_on_ranks
from ring_notebook.notebook.magics.session import Session
from ring_notebook.notebook.run import catalogue

__all__ = ["register"]

_CELL = re.compile(r"\s*%%ring(train|scale)\b.*\n")  # the lines after it run on the ranks
_PULL = re.compile(r"\s*%ring\s+pull\s")
_RUN = re.compile(r"\s*%ring\s+(runs\s+(?:compare|tag|note|delete)\s|export\s+\S+\s+)")
_NAME = re.compile(r"[^\W\d]\w*(\.\w*)*$")


def register(shell: InteractiveShell, session: Session) -> None:
    """Add the options of the magics and the names of the ranks to the completer of ``shell``."""

    def complete_ring(context: CompletionContext) -> dict[str, object]:
        line, token = context.text_until_cursor, context.token
        words = options.completions(line.lstrip())
        if _RUN.match(line):
            words += [name for name in catalogue.names() if name.startswith(token)]
        pull = _PULL.match(line) is not None
        on_ranks = _in_cell(context) or (session.default and runs_on_ranks(context.full_text))
        ranks = (pull and not token) or (_NAME.match(token) and (pull or on_ranks))
        names = _names(session, token) if ranks else []
        return {
            "completions": [
                *(SimpleCompletion(word, type="option") for word in words),
                *(SimpleCompletion(name, type="rank") for name in names),
            ],
            # A name of this notebook makes no sense there.
            "suppress": bool(words) or pull,
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
