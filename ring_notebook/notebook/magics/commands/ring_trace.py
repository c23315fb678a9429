"""`%ring trace`: where ranks part."""

from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run.timeline import Timeline
from ring_notebook.notebook.session.known_names import runs
from ring_notebook.notebook.session.session import Session


@command("runs")
def trace(
    session: Session,
    name: Annotated[str, Option("RUN", "of a run that failed; by default the last one", complete=runs)] = "",
) -> Timeline:
    """Go back through the last operations of all ranks, to the first place where ranks part.

    Raises RingError if none are kept, as for a run that ended well.
    """
    try:
        if session.run is not None and not name:
            return session.run.timeline()
        return Timeline.of_run(session.record(name).directory)
    except FileNotFoundError as error:
        raise RingError(f"{error}. Only runs that fail or are interrupted leave their last operations") from None
