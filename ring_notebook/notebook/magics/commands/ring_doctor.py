"""`%ring doctor`: whether everything is there that engines need."""

from typing import Annotated

from ring_notebook.launch.launchers.hosts import checked_hosts, parse_hosts
from ring_notebook.notebook.cluster.default_size import choose_size
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.session import Session


@command("cluster")
def doctor(
    session: Session,
    hosts: Annotated[
        str, Option("--hosts a:4,b:4", "these; by default those of the cluster or the job", checked_hosts)
    ] = "",
    json: Annotated[bool, Option("--json", "print it for tools, as JSON")] = False,
) -> str:
    """Check everything that engines need, on all hosts, and say what to fix."""
    from ring_notebook.launch.doctor import as_json, diagnose_hosts, render

    own = session.cluster.hosts if session.cluster is not None else choose_size().hosts
    checks = diagnose_hosts(parse_hosts(hosts) if hosts else own)
    return as_json(checks) if json else render(checks)
