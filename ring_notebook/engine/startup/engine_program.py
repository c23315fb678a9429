"""The program of an engine that our supervisor starts: ipyparallel's, with the number that the supervisor gave it."""

from __future__ import annotations

import os
import sys

from ipyparallel.engine.app import main as run_engine

from ring_notebook.rank.rank_variables import STARTED_AGAIN

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    # With --mpi an engine takes its number from MPI, which has no place for one that is started again.
    options = [f"--IPEngine.id={os.environ['RANK']}"] if os.environ.get(STARTED_AGAIN) else ["--mpi"]
    sys.argv[1:] = [*options, *sys.argv[1:]]
    run_engine()


if __name__ == "__main__":
    main()
