"""`%ring start`: a cluster on this host, on others, in a batch job, or in places that another engine lends."""

from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from ring_notebook.analysis.time_limits import WALLTIME_WARNING
from ring_notebook.errors import ClusterError
from ring_notebook.launch.batch_commands import login_node_of
from ring_notebook.launch.launchers.hosts import checked_hosts
from ring_notebook.launch.lent_places import ADDRESSES
from ring_notebook.notebook.cluster import cluster_folders
from ring_notebook.notebook.cluster.batch import HOLD, BatchJob
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_attach import attach, left_behind
from ring_notebook.notebook.magics.commands.ring_stop import stop
from ring_notebook.notebook.panel.chart_area import load_charts
from ring_notebook.notebook.session.follow_job import follow_job, require_no_job, warn_before_walltime
from ring_notebook.notebook.session.job_request import JobOptions, request_of
from ring_notebook.notebook.session.live_lines import ElapsedLine
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import count, duration, options_of
from ring_notebook.text.words import plural


@dataclass(frozen=True)
class _HoldingJob(JobOptions):
    requeue: Annotated[
        bool, Option("--requeue", "when the job starts again, run the set-up cells and resume the last one")
    ] = False
    idle: Annotated[float | None, Option("--idle 20m", "end the job when no cell has run for so long", duration)] = None
    signal: Annotated[
        float | None,
        Option(
            "--signal 5m",
            f"write a checkpoint so long before the time limit; by default {WALLTIME_WARNING / 60:g}m",
            duration,
        ),
    ] = None
    dry_run: Annotated[bool, Option("--dry-run", "print the script of the job and start nothing")] = False


@command("cluster", _HoldingJob)
def start(
    session: Session,
    n: Annotated[int | None, Option("-n N", "number of engines; by default one per slot, GPU or core", count)] = None,
    hosts: Annotated[str, Option("--hosts a:4,b:4", "hosts and the number of engines on each", checked_hosts)] = "",
    keep: Annotated[bool, Option("--keep", "keep the cluster when the kernel ends; `%ring attach` finds it")] = False,
    sync: Annotated[bool, Option("--sync", "before each cell do what `%ring sync` does")] = False,
    here: Annotated[bool, Option("--here", "also where this host is a login node")] = False,
    batch: Annotated[
        str,
        Option(
            "--batch SITE",
            "in a batch job: slurm, pbs, lsf, or a site with a file in ~/.config/ring_notebook/sites; returns at once",
        ),
    ] = "",
    on: Annotated[str, Option("--on ENGINE", f"in places that it lends: {ADDRESSES}")] = "",
    **job: Any,
) -> str:
    """Start a cluster of engines, one per rank.

    Returns how many engines and why, or that a cluster like this is running already. ``job`` are fields of
    `JobOptions` and others, for ``batch``. Raises ClusterError when a different cluster is running.
    """
    if batch and on:
        raise ClusterError("--batch and --on exclude each other: both choose the hosts")
    if batch:
        if hosts:
            raise ClusterError("--hosts and --batch exclude each other: the batch system chooses the hosts")
        submitted = _submit(session, batch, n, keep, **job)
        session.syncs = sync
        return submitted
    if given := [one.flags[0] for one in options_of(_HoldingJob) if job.get(one.sets)]:
        raise ClusterError(
            f"{', '.join(given)}: only of a batch job; add --batch slurm, pbs, lsf or the name of a site"
        )
    if session.cluster is not None and session.cluster.running:
        text = _running(session.cluster, n, hosts, keep)
        if sync and not session.syncs:
            session.syncs = True
            text += " From now on each cell begins with `%ring sync`."
        return text
    if session.cluster is not None:
        session.cluster.stop()
        session.cluster = None
    require_no_job(session)
    if not (here or hosts or on) and (system := login_node_of()):
        raise ClusterError(
            f"this host is a login node of {system.name}, which others work on: `%ring start --batch "
            f"{system.name.lower()} -N 2` starts engines in a batch job, `%ring start --here` on this host"
        )
    left = cluster_folders.left_behind()
    session.syncs = sync
    if left and keep and n in (None, left["n"]) and not hosts:
        return f"{attach(session, left['id'])} This notebook had kept it; `%ring restart` gives a fresh one."
    cluster = Cluster(n, hosts, keep=keep, on=on)
    warn_before_walltime(session)
    Thread(target=load_charts, name="ring-preload", daemon=True).start()  # while the engines start
    with ElapsedLine("Starting the engines:"):
        session.cluster = cluster.start()
    started = f"Started {described(cluster)} in {cluster.seconds_to_start:.1f} s."
    return "\n".join(filter(None, [started, cluster.warning, left_behind() if left else ""]))


def start_if_none(session: Session, n: int | None) -> None:
    """Start a cluster of ``n`` engines and say so, where there is none and no job will give one."""
    if session.cluster is None and session.job is None:
        session.tell(start(session, n, sync=session.syncs))


def described(cluster: Cluster) -> str:
    """How many engines a cluster has and why, and with how many threads each computes."""
    fewest, most = min(cluster.threads), max(cluster.threads)
    each = plural(most, "thread") if fewest == most else f"{fewest} to {most} threads"
    return f"{plural(cluster.n, 'engine')} ({cluster.why}{f'; {each} each' if most else ''})"


def _running(cluster: Cluster, n: int | None, hosts: str, keep: bool) -> str:
    """The answer to a start while ``cluster`` runs. Raises ClusterError when a different one was requested."""
    engines = plural(cluster.n, "engine")
    if cluster.serves(n, hosts, keep):
        return f"A cluster of {engines} is running already."
    restart = f" or change its size: `%ring restart -n {n}`" if cluster.serves(None, hosts, keep) else ""
    raise ClusterError(f"a different cluster of {engines} is running; stop it first: `%ring stop`{restart}")


def _submit(
    session: Session,
    site: str,
    n: int | None,
    keep: bool,
    *,
    idle: float | None = None,
    signal: float | None = None,
    dry_run: bool = False,
    **asked: Any,
) -> str:
    """Submit a job of ``site`` and follow it; with ``dry_run`` only return its script.

    Raises ClusterError for a job that is invalid or rejected, and while there is a cluster.
    """
    if dry_run:
        return request_of(site, n=n, **asked).script(HOLD, Path("output")).rstrip()
    require_no_job(session)
    if session.cluster is not None and session.cluster.running:
        raise ClusterError(f"A cluster of {plural(session.cluster.n, 'engine')} is running. `%ring stop` gives it up")
    job = BatchJob.submit(request_of(site, n=n, **asked), keep, idle=idle or 0.0, before_end=signal or WALLTIME_WARNING)
    follow_job(session, job, None, lambda why: stop(session, ended=why))
    return ""
