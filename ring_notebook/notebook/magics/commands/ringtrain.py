"""`%%ringtrain`: the cell on the ranks. The options of a cell are those of `protocol/ringtrain_options.py`."""

from collections.abc import Sequence
from keyword import iskeyword
from typing import Annotated, Any

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_start import start_if_none
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.sweep_report import SweepReport
from ring_notebook.notebook.session.cell_queue import QueuedCell
from ring_notebook.notebook.session.cells import check_syntax
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.session.sweep import sweep as run_sweep
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import values_of

_Sweep = Annotated[
    Sequence[tuple[str, list[Any]]] | None,
    Option("--sweep lr=0.1,0.01", "run the cell with each of these values of a constant", values_of, repeats=True),
]


def _variable(text: str) -> str:
    """The name of a variable, or the empty default. Raises ValueError for any other text."""
    if text and (not text.isidentifier() or iskeyword(text)):
        raise ValueError(f"expected the name of a variable, got {text!r}")
    return text


Out = Annotated[str, Option("--out VAR", "assign the run to this variable", _variable)]


@command("cells", CellOptions)
def train(session: Session, cell: str, out: Out = "", sweep: _Sweep = None, **given: Any) -> None:
    """Run the cell on every rank; starts a cluster when none is running.

    ``given`` are fields of `CellOptions`. With ``sweep`` it runs with all combinations of values: `run_sweep`.
    Raises as `run_cell`.
    """
    options = CellOptions(**given)
    check_syntax(cell, options.first_line)
    if sweep:
        start_if_none(session, None)
        run_sweep(session, cell, options, sweep, give=lambda report: assign(session, out, report))
        return
    start_if_none(session, options.n)
    run_cell(session, cell, options, give=lambda run: assign(session, out, run))


def assign(session: Session, out: str, run: Run | QueuedCell | SweepReport) -> None:
    """Assign the run, or the cell that waits; a run does not replace the waiting cell of another run."""
    before = session.variables.get(out)
    if out and (isinstance(run, QueuedCell) or not isinstance(before, QueuedCell) or before.run is run):
        session.variables[out] = run
