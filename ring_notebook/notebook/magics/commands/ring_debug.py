"""`%ring debug`: what ranks ask, and pdb over the exception that ended a cell."""

from collections.abc import Sequence
from typing import Annotated

from IPython.core.error import StdinNotImplementedError

from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run.failures import primary
from ring_notebook.notebook.session.session import Session


@command("cells", replaces={"answer": "debug --ask"})
def debug(
    session: Session,
    rank: Annotated[
        int | None, Option("-t, --rank RANK", "the exception of this rank; by default of the first to fail", int)
    ] = None,
    commands: Annotated[
        Sequence[str] | None,
        Option("-c CMD", "carry this out on the exception, and ask for no command", repeats=True),
    ] = None,
    ask: Annotated[bool, Option("--ask")] = False,
) -> str:
    """Answer input() and breakpoint() of background runs; without any, look at the exception that ended the last cell.

    The exception is of a rank of the last run. pdb carries out ``commands``, or without any what the user types until
    ``q``; with ``ask`` there is no pdb. Raises RingError when no rank has failed, and ClusterError when
    ``rank`` has left no exception.
    """
    if rank is None and not commands:
        asked = [run for run in session.in_progress if run.answer()]
        if asked or ask:
            lines = [f"Run {run.log.title} {'has ended' if run.done else 'continues'}." for run in asked]
            return "\n".join(lines) or "No rank asks anything."
    cluster = session.require()
    log = session.run.log if session.run is not None else None
    if rank is None:
        failed = primary(log.failures()) if log is not None else []
        if not failed:
            raise RingError(
                "no rank has failed in the last cell, and none asks anything; `%ring debug -t RANK` looks at one"
            )
        rank = failed[0].rank
    ranks = log.environment.get("ranks") if log is not None else None
    _debug_rank(cluster, ranks[rank] if ranks and rank < len(ranks) else rank, f"rank {rank}", commands or ())
    return ""


def _debug_rank(cluster: Cluster, engine: int, name: str, commands: Sequence[str]) -> None:
    """Let the user debug the exception on ``engine``, which is called ``name``, until pdb ends.

    With ``commands`` these are carried out and nothing is asked. Raises ClusterError when the engine has no exception,
    RingError when the front end cannot ask.
    """
    text, goes_on = cluster.debug(engine)
    print(f"{name}:\n{text}", end="")  # noqa: T201
    given = iter(commands)
    while goes_on:
        if commands:
            command = next(given, "")
            if not command:
                return
        else:
            try:
                command = input(f"{name} (Pdb) ") or "where"
            except EOFError:
                return
            except StdinNotImplementedError:
                raise RingError(
                    "this front end cannot ask for commands; give them: `%ring debug -c 'p x' -c where`"
                ) from None
        text, goes_on = cluster.debug(engine, command)
        print(text, end="")  # noqa: T201
