"""The trace of a job that has failed: the last operations of all its ranks, also of those that were killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ring_notebook.analysis.job_failure import RankFailure, first_failure
from ring_notebook.analysis.operation_log import as_events, complete, parse, parting


def write_trace(path: Path, logs: Mapping[int, bytes], failures: Sequence[RankFailure]) -> str:
    """Write the operations in the ``logs`` of ranks to ``path``, for ui.perfetto.dev. Returns what to say of it."""
    operations = [one for rank, log in sorted(logs.items()) for one in parse(log, rank)]
    if not operations:
        return f"{path} was not written: no rank has called an operation"
    first = first_failure(failures)
    # What a rank has raised it says itself.
    ends = {first.rank: f"ended ({first.how})"} if first and (first.reason or first.code != 1) else {}
    events = complete(as_events(operations), ends)
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        return f"the trace {path} cannot be written: {error.strerror}"
    found = parting(operations, ends)
    lost = sorted(set(logs) - {one.rank for one in operations})
    missing = f"; nothing is known of {', '.join(f'rank {rank}' for rank in lost)}" if lost else ""
    return f"{found.text if found else 'the ranks kept step'}{missing}. {path} has the last operations of all ranks"
