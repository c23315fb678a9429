"""Cells as a batch job of their own: `submit` sends them, ``python -m ...submitted FOLDER`` runs them in the job."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.launch.batch_commands import BatchError
from ring_notebook.launch.job_script import BatchRequest
from ring_notebook.launch.own_batch_job import walltime
from ring_notebook.launch.supervisor.inherited_variables import without_outer_job
from ring_notebook.machine.own_python import module_command
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.record.run_files import read_json
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import resumes_from
from ring_notebook.notebook.run.send_cell import spoken_name
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.words import plural

_CELLS = "cells.json"


def submit(request: BatchRequest, runs: Sequence[RunRecord]) -> str:
    """Submit a job that runs the cells of ``runs`` in order; returns what a user should know of it.

    Raises ClusterError when the batch system rejects it.
    """
    folder = runs_directory().parent / "jobs" / f"submitted-{uuid.uuid4().hex[:8]}"
    name = runs[-1].options.get("name") or spoken_name(runs_directory())
    names = [*(one.name for one in runs[:-1]), name]
    cells = [
        {"source": one.source, "options": one.options, "name": called} for one, called in zip(runs, names, strict=True)
    ]
    make_private_folder(folder)
    with open_private(folder / _CELLS, "w") as file:
        # Not by way of the batch system, which sends and keeps it for others to read.
        json.dump({"n": request.n, "cells": cells, "environment": without_outer_job(os.environ)}, file)
    command = module_command("ring_notebook.notebook.cluster.submitted", str(folder))
    with open_private(folder / "job.sh", "w") as file:
        file.write(request.script(command, folder / "output"))
    try:
        number = request.batch_system.submit_script(str(folder / "job.sh"))
    except BatchError as error:
        raise ClusterError(str(error)) from None
    cancels = " ".join([*request.batch_system.cancel, number])
    job = f"{request.batch_system.name} job {number} for {plural(request.n, 'rank')} on {plural(request.hosts, 'host')}"
    return (
        f"Submitted {job}. `%ring runs` lists its run {name} once it has begun. The job writes to {folder / 'output'}; "
        f"`{cancels}` cancels it."
    )


def main() -> None:
    """Run the cells on a cluster over the hosts of this job; exits with 1 when one fails."""
    about = read_json(Path(sys.argv[1]) / _CELLS)
    os.environ.update({name: value for name, value in about["environment"].items() if name not in os.environ})
    config.cache_clear()
    try:
        with Cluster(about["n"]) as cluster:
            walltime().warn = lambda _: cluster.write_checkpoint()  # of the run in progress
            for cell in about["cells"]:
                options = CellOptions.of(cell["options"])
                if int(os.environ.get("SLURM_RESTART_COUNT", "0")):  # the job was put back into the queue
                    with suppress(RingError):
                        resumes_from(cell["name"], "")
                        options = replace(options, resume=True)
                options = replace(options, **_ranks_in_job(options, about["n"]))
                cluster.send(cell["source"], replace(options, pause_at=()), cell["name"]).wait()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:  # unless the job is put back into the queue
        (Path(sys.argv[1]) / _CELLS).unlink(missing_ok=True)


def _ranks_in_job(options: CellOptions, size: int) -> dict[str, Any]:
    """Set-up cells keep their ranks, as far as the job has them; the cell of the job takes all."""
    if not options.setup:
        return {"n": None, "ranks": None}
    there = None if options.ranks is None else [rank for rank in options.ranks if rank < size]
    return {"n": None if options.n is None else min(options.n, size), "ranks": there or None}


if __name__ == "__main__":
    main()
