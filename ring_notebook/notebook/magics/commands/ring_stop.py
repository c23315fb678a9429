"""`%ring stop`: the cluster with all that it has, or only runs in progress."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.errors import ClusterError
from ring_notebook.launch.own_batch_job import who_ended_it
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.session.known_names import runs_in_progress
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.words import plural
from ring_notebook.text.words import ranks as rank_text


@command("cluster", replaces={"interrupt": "stop --runs"})
def stop(
    session: Session,
    names: Annotated[
        Sequence[str],
        Option("RUN", "only these runs: beginnings of names or ids", many=True, complete=runs_in_progress),
    ] = (),
    runs: Annotated[bool, Option("--runs", "only the runs in progress, all of them")] = False,
    ended: str = "",
) -> str:
    """Stop the cluster; or only runs in progress, whose ranks keep their variables.

    A stop of the cluster cancels its batch job; ``ended`` says why it has ended already. Raises RingError for a name
    that does not match exactly one run in progress.
    """
    if names or runs:
        return _stop_runs(session, names)
    session.why_ended = ended
    back = "" if ended and session.cluster is None else cancel_cells(session)
    back += " Cells run in this notebook again." if session.default else ""
    job, session.job = session.job, None
    cluster, session.cluster = session.cluster, None
    session.default = False
    if job is None:
        return _stop(cluster, back)
    stopped = _stop(cluster, "") if cluster is not None else ""
    cancelled = "" if ended else f" Cancelled {job.job.name}."
    return f"{stopped}{cancelled}{job.close()}{back}".strip()


def cancel_cells(session: Session) -> str:
    """Cancel all cells that wait, because the ranks lose their variables; returns a sentence about it."""
    cancelled = session.waiting.cancel()
    return f" Cancelled {plural(len(cancelled), 'cell')} of the queue." if cancelled else ""


def _stop_runs(session: Session, names: Sequence[str]) -> str:
    waiting = session.waiting.cells
    lines = [
        f"Run {run.log.title} has ended."
        if run.stop()
        else f"Run {run.log.title} is still stopping: {run.describe()}; {run.advice()}."
        for run in ([session.steered(name) for name in names] if names else session.in_progress)
    ]
    if lines and waiting:
        lines.append(f"Next runs cell {waiting[0].name}; `%ring queue` lists what waits, `%ring queue cancel` ends it.")
    return "\n".join(lines) or "No run is in progress."


def _stop(cluster: Cluster | None, back: str) -> str:
    if cluster is None:
        return f"There is no cluster.{back}"
    engines, dead = plural(cluster.n, "engine"), _dead(cluster)
    cluster.stop()
    if cluster.foreign:
        return f"Left the cluster of {engines}; the notebook that has started it keeps it.{back}"
    stopped = [rank for rank in range(cluster.n) if rank not in dead]
    if not stopped:
        return f"All {engines} had died already.{back}"
    if dead:
        return f"Stopped {plural(len(stopped), 'engine')}; {rank_text(dead)} had died already.{back}"
    return f"Stopped {engines}.{back}"


def _dead(cluster: Cluster) -> list[int]:
    if cluster.death is not None or who_ended_it():  # a batch system ends engines one after another
        return list(range(cluster.n))
    try:
        return sorted(set(range(cluster.n)).difference(cluster.living))
    except ClusterError:  # it has not started
        return []
