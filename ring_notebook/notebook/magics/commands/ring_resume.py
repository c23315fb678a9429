"""`%ring resume`: a paused run continues."""

from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.known_names import runs_in_progress
from ring_notebook.notebook.session.session import Session


@command("steering")
def resume(
    session: Session, name: Annotated[str, Option("RUN", "if there are several", complete=runs_in_progress)] = ""
) -> str:
    """End a pause."""
    run = session.steered(name)
    run.steer("resume", {}, "%ring resume")
    return f"Run {run.log.title} continues."
