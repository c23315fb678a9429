"""Asks for pdb's commands in the notebook and prints what a rank answers."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.error import StdinNotImplementedError

from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster

__all__ = ["debug_rank"]


def debug_rank(cluster: Cluster, engine: int, name: str, commands: Sequence[str] = ()) -> None:
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
