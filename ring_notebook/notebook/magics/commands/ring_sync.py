"""`%ring sync`: the user's modules on the ranks."""

from ring_notebook.notebook.line_command import command
from ring_notebook.notebook.session.session import Session


@command("cluster")
def sync(session: Session) -> str:
    """Bring modules that have changed in this folder to the ranks and reload them there.

    Raises as `Cluster.sync`.
    """
    return str(session.require().sync())
