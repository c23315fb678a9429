"""`%ring attach`: a cluster that another kernel has started or kept, or the last run of this one once more."""

from typing import Annotated

from ring_notebook.errors import ClusterError
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.batch import BatchJob, running_in
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_stop import stop
from ring_notebook.notebook.run.export import set_up_cells, set_up_runs
from ring_notebook.notebook.session.follow_job import follow_job
from ring_notebook.notebook.session.run_cell import LIVE_AFTER
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.words import plural


@command("cluster")
def attach(
    session: Session,
    cluster: Annotated[
        str,
        Option(
            "CLUSTER",
            "its notebook, or the beginning of its id; by default this notebook's, else the one that another has kept",
        ),
    ] = "",
) -> str:
    """Attach to a running cluster and its run, after a kernel restart or from another notebook.

    In a notebook that has a cluster: show its last run again, with everything that the ranks have printed. Raises as
    `Cluster.attach`.
    """
    if session.cluster is not None and session.cluster.running:
        text = f"This notebook has a cluster of {plural(session.cluster.n, 'engine')}."
        if cluster:
            raise ClusterError(f"{text} `%ring stop` gives it up, then `%ring attach {cluster}` takes another.")
        return f"{text} {_show_run(session) or 'No cell has run yet.'}"
    if not cluster and session.job is None and (job := BatchJob.left_behind()):
        found = running_in(job)
        text = _take(session, found) if found is not None else ""
        job.describe()
        follow_job(session, job, found, lambda why: stop(session, ended=why))
        return text
    return _take(session, Cluster.attach(cluster))


def left_behind() -> str:
    """One line on the cluster that an earlier kernel of this notebook left running; empty without one."""
    if job := BatchJob.left_behind():
        return f"{job.name} for {plural(job.request.n, 'engine')} of this notebook was kept: `%ring attach`."
    left = cluster_folders.left_behind()
    where = "this notebook" if left.get("notebook") else "this folder"
    return f"A cluster of {plural(left['n'], 'engine')} from {where} is running: `%ring attach`." if left else ""


def _take(session: Session, cluster: Cluster) -> str:
    """Take over a cluster that another kernel has started, and show its newest run."""
    session.cluster = cluster
    session.run = cluster.last_run
    session.setup = set_up_cells(set_up_runs(runs_directory(), cluster.directory.name))
    return f"Attached to {plural(cluster.n, 'engine')}. {_show_run(session) or 'No run is in progress.'}"


def _show_run(session: Session) -> str:
    """Show the last run; returns whether it has ended, an empty text without one."""
    run = session.run
    if run is None:
        return ""
    run.show(run.log.options.get("plot", ()), LIVE_AFTER)
    if run.done:
        return f"Run {run.log.title} has ended."
    return f"Run {run.log.title} is in progress. {run.asks()}".rstrip()
