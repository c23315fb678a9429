"""`%ring classroom`: the runs that others share."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run.classroom import Classroom
from ring_notebook.notebook.session.session import Session


@command("sharing")
def classroom(
    session: Session,
    sources: Annotated[
        Sequence[str], Option("FOLDER|LINK", "where they share them; off: the tiles stay as they are", many=True)
    ],
) -> None:
    """Show the runs that others share, as tiles: those that need somebody first.

    They are drawn in the current cell. See `Classroom`.
    """
    before, session.classroom = session.classroom, None
    if before is not None:
        before.close()
    if list(sources) != ["off"]:
        session.classroom = Classroom(sources)
