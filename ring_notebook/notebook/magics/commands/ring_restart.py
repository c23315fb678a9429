"""`%ring restart`: the whole cluster, or some ranks in the middle of what they do."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_heal import heal
from ring_notebook.notebook.magics.commands.ring_stop import cancel_cells
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.session.live_lines import ElapsedLine
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import count, rank_numbers
from ring_notebook.text.words import plural


@command("cluster")
def restart(
    session: Session,
    n: Annotated[int | None, Option("-n N", "number of engines; by default as before", count)] = None,
    ranks: Annotated[
        Sequence[int] | None,
        Option(
            "--rank 0,2-3",
            "end these alone, also in the middle of a cell, and start them again; the others keep their variables",
            rank_numbers,
        ),
    ] = None,
    rerun: Annotated[bool, Option("--rerun", "run the cells with --setup again")] = False,
) -> str:
    """Stop the cluster and start it again; all variables of ranks are lost."""
    cluster = session.require()
    if ranks is not None:
        with session.waiting.held():
            cluster.end(ranks)
            return heal(session, ranks)
    cancelled = cancel_cells(session)
    with ElapsedLine("Restarting the engines:"):
        cluster.restart(n)
    text = (
        f"Restarted {plural(cluster.n, 'engine')} in {cluster.seconds_to_start:.1f} s; all variables of ranks are lost."
    )
    text += cancelled
    cells = set_up_cells(session.setup)
    if not rerun:
        if cells:
            text += f" `%ring restart --rerun` would run {plural(len(cells), 'set-up cell')} again."
        return text
    for cell in cells:
        run_cell(session, cell.source, CellOptions.of(cell.options))
    return f"{text} Ran {plural(len(cells), 'set-up cell')} again."
