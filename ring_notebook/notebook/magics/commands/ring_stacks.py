"""`%ring stacks`: where every rank is."""

from ring_notebook.notebook.line_command import command
from ring_notebook.notebook.session.session import Session


@command("runs")
def stacks(session: Session) -> str:
    """Show where every rank is now, in the cell and in what it has called."""
    return session.stacks()
