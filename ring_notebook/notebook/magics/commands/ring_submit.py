"""`%ring submit`: a cell as a batch job."""

from typing import Annotated, Any

from ring_notebook.notebook.cluster import submitted
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run.export import set_up_before
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.job_request import JobOptions, request_of
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import count


@command("jobs", JobOptions)
def submit(
    session: Session,
    site: Annotated[str, Option("SITE", "slurm, pbs, lsf, or a site as of `%ring start --batch`")],
    name: Annotated[str, Option("RUN", "the cell of this run", complete=known_names.runs)] = "",
    n: Annotated[int | None, Option("-n N", "ranks; by default one for each GPU, else as the run had", count)] = None,
    requeue: Annotated[bool, Option("--requeue", "when the job starts again, resume the cell")] = False,
    **asked: Any,
) -> str:
    """Run the last cell that trained, after the --setup cells before it, as a batch job of its own.

    Raises RingError when there is no such run, and ClusterError when the batch system rejects the job.
    """
    record = session.trained(name)
    request = request_of(site, n=n, requeue=requeue, ran_with=record.size, **asked)
    return submitted.submit(request, [*set_up_before(record), record])
