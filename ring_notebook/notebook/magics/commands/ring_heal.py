"""`%ring heal`: ranks that have died."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.run_cell import start_ranks
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import rank_numbers
from ring_notebook.text.words import plural


@command("cluster")
def heal(
    session: Session,
    ranks: Annotated[
        Sequence[int] | None,
        Option("-t, --ranks 0,2-3", "start these again, dead or alive; by default all dead ones", rank_numbers),
    ] = None,
) -> str:
    """Start the ranks again that have died; the others keep their variables.

    Runs the set-up cells on these alone. Raises what `Cluster.heal` raises, and what a set-up cell does.
    """
    text = start_ranks(session, lambda cluster: cluster.heal(ranks), "again ")
    return text or f"No rank has died: {plural(session.require().n, 'rank')} live."
