"""`%ring queue`: the cells that wait for ranks."""

import time
from collections.abc import Sequence
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.style import ago
from ring_notebook.notebook.table import Listing
from ring_notebook.text.line_options import count
from ring_notebook.text.words import rank_list


@command("cells")
def queue(session: Session) -> Listing:
    """List the cells that wait for ranks which a run uses."""
    rows = [
        [str(one.number), one.name, rank_list(sorted(one.ranks)), ago(time.time() - one.since), one.behind]
        for one in session.waiting.cells
    ]
    return Listing(["cell", "name", "ranks", "since", "waits for"], rows, "" if rows else "No cell waits.")


@queue.command
def cancel(
    session: Session,
    cells: Annotated[Sequence[int], Option("N", "their numbers; by default all of them", count, many=True)] = (),
) -> str:
    """Cancel cells that wait.

    Raises RingError for an unknown number.
    """
    return " ".join(f"Cancelled cell {one.name}." for one in session.waiting.cancel(cells)) or "No cell waits."
