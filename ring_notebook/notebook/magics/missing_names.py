"""A NameError in the notebook for a variable that the ranks have says how to bring it here."""

from __future__ import annotations

from types import TracebackType

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.notebook.magics.session import Session

__all__ = ["register"]


def register(shell: InteractiveShell, session: Session) -> None:
    """Add the advice to the NameErrors of ``shell``."""

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
