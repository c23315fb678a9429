"""`%ring pull`: variables of a rank for this notebook."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.known_names import names_of_ranks
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.table import Listing


@command("cells")
def pull(
    session: Session,
    names: Annotated[Sequence[str], Option("NAME", "variables", many=True, complete=names_of_ranks)],
    rank: Annotated[int, Option("-t, --rank RANK", "the rank to copy from; by default 0", int)] = 0,
) -> Listing:
    """Copy variables of a rank into this notebook.

    Returns a table that describes them on every rank.
    """
    cluster = session.require()
    session.variables.update({name: cluster.pull(name, rank) for name in names})
    rows = []
    for name in names:
        kinds = [kinds.get(name, "missing") for kinds in cluster.variables(name)]
        rows += [[name, str(index), kind] for index, kind in enumerate(kinds)]
    return Listing(["name", "rank", "value"], rows, f"pulled from rank {rank}")
