"""`%ring resize`: another number of engines."""

from typing import Annotated

from ring_notebook.launch.launchers.hosts import checked_hosts
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.run_cell import start_ranks
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import count
from ring_notebook.text.words import plural
from ring_notebook.text.words import ranks as rank_text


@command("cluster", replaces={"grow": "resize --only grow", "shrink": "resize --only shrink"})
def resize(
    session: Session,
    n: Annotated[int, Option("N", "number of engines from now on", count)],
    hosts: Annotated[
        str, Option("--hosts a:4,b:4", "hosts and the number of engines that each may have", checked_hosts)
    ] = "",
    only: Annotated[str, Option("--only WAY", choices=("grow", "shrink"))] = "",
) -> str:
    """Start more engines, or end the last ones; the others keep their variables.

    Runs the set-up cells on new engines. ``only`` allows just one of both. Raises ClusterError as
    `Cluster.grow` and `Cluster.shrink`.
    """
    cluster = session.require()
    if n == cluster.n and not hosts and not only:
        return f"The cluster has {plural(n, 'engine')} already."
    if (only or ("grow" if n > cluster.n or hosts else "shrink")) == "grow":
        return start_ranks(session, lambda cluster: cluster.grow(n, hosts))
    with session.waiting.held():
        ended = cluster.shrink(n)
    others = "the other engine keeps its" if cluster.n == 1 else f"the other {cluster.n} engines keep their"
    return f"Ended {rank_text(ended)}; {others} variables."
