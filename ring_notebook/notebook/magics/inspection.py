"""Shift+Tab and `name?` in the notebook for names that only the ranks have, such as those of ``ring``."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.notebook.magics.session import Session

__all__ = ["register"]


def register(shell: InteractiveShell, session: Session) -> None:
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
