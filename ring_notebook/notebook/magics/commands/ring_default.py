"""`%ring default`: where cells without a magic run."""

from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.words import plural


@command("cells")
def default(
    session: Session,
    state: Annotated[
        str | None, Option("on|off", "without it: say where such cells run", choices=("on", "off"))
    ] = None,
) -> str:
    """Run cells without a magic on the ranks (on), except those with %%local, or in the notebook (off)."""
    if state is not None:
        session.default = state == "on"
    if not session.default:
        return "Cells run in this notebook; %%ringtrain runs one on the ranks."
    cluster = session.cluster
    where = f"the {plural(cluster.n, 'engine')}" if cluster is not None else "all engines; the first starts them"
    return f"Cells run on {where}. %%local runs one in this notebook, `%ring default off` all."
