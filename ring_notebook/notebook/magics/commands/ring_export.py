"""`%ring export`: a cell as a script."""

import sys
from pathlib import Path
from typing import Annotated, Any

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run import export as scripts
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.job_request import JobOptions, request_of
from ring_notebook.notebook.session.session import Session


@command("jobs", JobOptions)
def export(
    session: Session,
    path: Annotated[str, Option("FILE", "the script to write")],
    name: Annotated[str, Option("RUN", "export the cell of this run", complete=known_names.runs)] = "",
    job: Annotated[str, Option("--job SITE", "also write FILE.sh, which runs it in a batch job")] = "",
    **asked: Any,
) -> str:
    """Write the last cell that trained, and the --setup cells before it, as a script for ringrun.

    Raises RingError when there is no such run, when ``path`` or the job's script exists and export did not write it,
    and for invalid options of the job.
    """
    record = session.trained(name)
    if not job:
        if any(asked.values()):
            raise RingError("-N, --gpus, --time, --queue and --account belong to --job SITE")
        return str(scripts.export(record, path))
    request = request_of(job, ran_with=record.size, **asked)
    file, made = Path(path).with_suffix(".sh"), scripts.export(record, path)
    ringrun = str(Path(sys.executable).with_name("ringrun"))  # a job need not have this environment's PATH
    command = [ringrun, "-np", str(request.n), sys.executable, str(Path(path))]
    return f"{made}\n{scripts.write_job(file, request.script(command, file.with_suffix('.out').absolute()))}"
