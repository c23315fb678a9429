"""`%ring status`: the engines and what each is doing."""

import json as to_json
from dataclasses import asdict
from typing import Annotated

from ring_notebook.launch.own_batch_job import job_name, walltime
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_start import described
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.style import duration
from ring_notebook.notebook.table import Listing

_COLUMNS = ("rank", "host", "pid", "device", "state", "memory")


@command("cluster")
def status(
    session: Session, json: Annotated[bool, Option("--json", "print it for tools, as JSON")] = False
) -> Listing | str:
    """List the engines and what each is doing.

    As JSON it has the newest run too; docs/tasks/tools.md describes it.
    """
    if json:
        return _as_json(session)
    if session.to_come is not None:
        return Listing(_COLUMNS, [], session.to_come.line)
    cluster = session.require()
    titles = {run.log.run: run.log.title for run in session.in_progress}
    rows = [
        [
            str(one.rank),
            one.host,
            str(one.pid),
            one.device,
            f"in run {titles.get(one.run, one.run)}" if one.run else one.state,
            one.memory_text,
        ]
        for one in cluster.status()
    ]
    left = walltime().left
    below = [described(cluster)]
    if left is not None:
        below.append(f"{job_name()} reaches its time limit in {duration(left)}")
    if titles:
        below.append("`%ring attach` shows the panel of the run in progress here, too")
    return Listing(_COLUMNS, rows, "\n".join(below))


def _as_json(session: Session) -> str:
    if session.to_come is not None:
        waits = {"engines": 0, "why": session.to_come.line, "walltime_left": None, "ranks": [], "run": None}
        return to_json.dumps(waits)
    cluster, run = session.require(), session.run
    about = {
        "engines": cluster.n,
        "why": cluster.why,
        "walltime_left": walltime().left,
        "ranks": [asdict(one) for one in cluster.status()],
        "run": None if run is None else {"id": run.log.run, "name": run.log.name, "status": run.status},
    }
    return to_json.dumps(about)
