"""`%ring share`: the newest run for others to see."""

from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session


@command("sharing")
def share(
    session: Session,
    where: Annotated[str, Option("FOLDER", "a folder instead of a link; off: share nothing more")] = "",
    name: Annotated[str, Option("--as NAME", "your name there; by default your login")] = "",
) -> str:
    """Let others see the newest run: by a read-only link, or by a small file in a folder that they can read.

    Raises as `Sharing.begin`.
    """
    return session.sharing.begin(where, name)
