"""`%ring pause`: a run in progress waits."""

from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.known_names import runs_in_progress
from ring_notebook.notebook.session.session import Session


@command("steering")
def pause(
    session: Session, name: Annotated[str, Option("RUN", "if there are several", complete=runs_in_progress)] = ""
) -> str:
    """Have all ranks of the run in progress wait at the end of the same step."""
    run = session.steered(name)
    run.steer("pause", {}, "%ring pause")
    return f"Run {run.log.title} pauses at the end of its next step; `%ring resume` ends that."
