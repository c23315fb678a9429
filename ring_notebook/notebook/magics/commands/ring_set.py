"""`%ring set`: knobs of a run in progress."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run.knob_changes import listing
from ring_notebook.notebook.session.known_names import knobs
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.style import shown
from ring_notebook.notebook.table import Listing


@command("steering")
def set_knobs(
    session: Session,
    words: Annotated[
        Sequence[str],
        Option("lr=0.05", "values of knobs, after the name of a run if there are several", many=True, complete=knobs),
    ] = (),
) -> Listing | str:
    """Change knobs of the run in progress, on all ranks at the same step; without values, list them.

    Lists those of the last run where none is in progress. Raises RingError for several names, and as `Run.set`.
    """
    values = dict(word.split("=", 1) for word in words if "=" in word)
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise RingError(
            f"%ring set takes values such as lr=0.05, and before them the name of one run; got {' '.join(named)}"
        )
    name = "".join(named)
    if not values:
        log = session.steered(name).log if session.in_progress else session.record(name)
        return listing(log.title, log.view())
    run = session.steered(name)
    read = run.steer("set", values, "%ring set")
    changed = ", ".join(f"{knob} = {shown(value)}" for knob, value in read.items())
    return f"{changed} from the next step of all ranks of run {run.log.title} on."
