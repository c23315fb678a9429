"""`%ring share`: the newest run for others to see, and the cluster for agents."""

from collections import deque
from collections.abc import Sequence
from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.notebook.lab.lab import Lab
from ring_notebook.notebook.lab.tool_server import ToolServer
from ring_notebook.notebook.lab.tools import PERMISSIONS, Bounds, ToolCalls
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.note import place
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import count, duration, name_list

_PANELS = 4  # for runs of agents; the newest takes the place of the oldest


@command("sharing")
def share(
    session: Session,
    where: Annotated[str, Option("FOLDER", "a folder instead of a link; off: share nothing more")] = "",
    name: Annotated[str, Option("--as NAME", "your name there; by default your login")] = "",
) -> str:
    """Let others see the newest run: by a read-only link, or by a small file in a folder that they can read.

    Raises as `Sharing.begin`.
    """
    return session.sharing.begin(where, name)


@share.command
def agents(
    session: Session,
    state: Annotated[str, Option("on", "or off", choices=("on", "off"))] = "on",
    may: Annotated[
        Sequence[str], Option("--may read,steer", "what they may do: read, steer, run, manage", name_list)
    ] = ("read",),
    seconds: Annotated[float, Option("--seconds 10min", "a run of theirs at most", duration)] = 600.0,
    n: Annotated[int, Option("-n N", "ranks of such a run at most", count)] = 0,
) -> str:
    """Let agents of yours on this machine call ring-notebook-mcp; their runs are shown here.

    Raises RingError for a permission that does not exist, and as `check_folder`.
    """
    if unknown := sorted(set(may) - set(PERMISSIONS)):
        raise RingError(f"no permission {', '.join(unknown)}; there are: {', '.join(PERMISSIONS)}")
    before, session.close_to_agents = session.close_to_agents, None
    if before is not None:
        before()
    if state == "off":
        return "Agents can call nothing more; their runs go on, and `%ring stop --runs` ends them."
    places = deque([place(), place()] for _ in range(_PANELS))

    def show(run: Run) -> None:
        places.rotate(-1)
        run.show(places=(places[-1][0], places[-1][1]))

    bounds = Bounds(frozenset(may), seconds, n)
    session.close_to_agents = ToolServer(ToolCalls(Lab(session, begun=show), bounds)).close
    return (
        f"Open to agents of yours on this machine by `ring-notebook-mcp`: each {bounds}. `%ring runs calls` lists what "
        "they call, Stop ends a run of theirs, `%ring share agents off` ends it all."
    )
