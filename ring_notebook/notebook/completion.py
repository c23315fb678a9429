"""Tab completion of the ranks' variables in cells that run on them."""

from __future__ import annotations

import re

from IPython.core.completer import CompletionContext, SimpleCompletion
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.notebook.session import Session

__all__ = ["register"]

# Cells for the ranks, and the commands that take the name of a rank's variable.
_WANTED = re.compile(r"%%ring(train|scale)\b|%ring\s+pull\b")
_NAME = re.compile(r"[^\W\d]\w*$")


def register(shell: InteractiveShell, session: Session) -> None:
    """Add the names of the ranks' variables to the completer of ``shell``."""

    def complete_rank_variables(context: CompletionContext) -> dict[str, list[SimpleCompletion]]:
        if not _WANTED.match(context.full_text.lstrip()) or not _NAME.match(context.token):
            return {"completions": []}
        names = session.variable_names()
        return {
            "completions": [SimpleCompletion(name, type="rank") for name in names if name.startswith(context.token)]
        }

    complete_rank_variables.matcher_api_version = 2  # type: ignore[attr-defined]
    shell.Completer.custom_matchers.append(complete_rank_variables)
