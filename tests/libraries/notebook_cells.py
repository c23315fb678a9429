"""Notebook 18's training cells on a cluster: ``notebook_cells.py CLUSTER``, whose options are JSON.

Prints, as JSON, the test losses, and the share of a weight that rank 0 has of the sharded model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "18_fine_tuning.ipynb"
MAGIC = "%%ringtrain"


def cells() -> list[str]:
    """The cells that define what is trained, and those of three runs, without their first line, in their order."""
    found = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    wanted = ("--setup\nimport argparse", "--setup\ndef fit", "--name pretrained ", "--name full ", "--name sharded ")
    return [source.split("\n", 1)[1] for start in wanted for source in found if source.startswith(f"{MAGIC} {start}")]


def last(run: Run, name: str) -> float:
    """The last value of a metric on rank 0."""
    return float([row.values[name] for row in run.metrics if row.rank == 0 and name in row.values][-1])


if __name__ == "__main__":
    with Cluster(**json.loads(sys.argv[1])) as cluster:
        runs = [cluster.run(cell).wait() for cell in cells()]
    before, full, sharded = (last(run, "test") for run in runs[2:])
    print(json.dumps({"before": before, "full": full, "sharded": sharded, "share": last(runs[-1], "share")}))  # noqa: T201
