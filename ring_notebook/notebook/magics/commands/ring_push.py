"""`%ring push`: variables of this notebook for the ranks."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.words import plural


@command("cells")
def push(session: Session, names: Annotated[Sequence[str], Option("NAME", "variables", many=True)]) -> str:
    """Copy variables of this notebook to every rank.

    Raises RingError if the notebook has none of that name.
    """
    if missing := [name for name in names if name not in session.variables]:
        raise RingError(f"no variable {', '.join(missing)} in this notebook")
    cluster = session.require()
    cluster.push({name: session.variables[name] for name in names})
    return f"Pushed {', '.join(names)} to {plural(cluster.n, 'rank')}."
