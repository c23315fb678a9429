"""`%ring stacks`: where every rank is."""

from ring_notebook.notebook.cluster.stacks import render
from ring_notebook.notebook.line_command import command
from ring_notebook.notebook.session.session import Session


@command("runs")
def stacks(session: Session) -> str:
    """Show where every rank is now, in the cell and in what it has called."""
    found = session.require().stacks()
    logs = [run.log for run in (*session.in_progress, session.run) if run is not None]
    return render(found, {log.run: (log.source, log.options.get("first_line", 1)) for log in logs})
