"""A run at one moment as plain data that JSON can hold, for other front ends and tools."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import Any

from ring_notebook.notebook.panel.labelled_lines import Lines
from ring_notebook.notebook.panel.time_left import progress
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import RankView

MOST_LINES = 100  # of output, the newest


def plain_state(log: RunRecord, error: str, asking: Collection[int]) -> dict[str, Any]:
    """The state of a run (docs/tasks/tools.md lists its keys); ``asking`` are the ranks that wait for an answer."""
    view = log.view()
    done = progress(view, log.source)
    return {
        "run": log.run,
        "name": log.name,
        "status": log.status,
        "error": error,
        "size": log.size,
        "started": log.started,
        "seconds": round(view.elapsed, 3),
        "progress": done.share,
        "seconds_left": _number(done.left),
        "samples_per_s": _number(view.samples_per_s),
        "metrics": list(view.names),
        "paused": view.paused,
        "knobs": {name: knob.value for name, knob in view.knobs.items()},
        "changes": [
            {
                "action": one.action,
                "values": one.values,
                "who": one.who,
                "time": round(one.time, 3),
                "steps": one.point,
                "step": one.step,
            }
            for one in view.changes
        ],
        "ranks": [_rank(rank, rank.rank in asking) for rank in view.ranks],
        "output": [
            {"ranks": list(line.ranks), "stream": line.stream, "text": line.text}
            for line in Lines().take(view.output, last=True)[-MOST_LINES:]
        ],
        "failures": [
            {
                "rank": failure.rank,
                "type": failure.ename,
                "message": failure.message,
                "traceback": failure.traceback,
                "stopped_by_another": failure.aborted,
            }
            for failure in view.failures
        ],
        "directory": str(log.directory),
    }


def _rank(rank: RankView, asks: bool) -> dict[str, Any]:
    status = rank.status
    done, total = rank.progress
    return {
        "rank": rank.rank,
        "status": rank.ended.status if rank.ended else "running" if status else "starting",
        "line": status.line if status and not rank.ended else 0,
        "waiting": status.waiting if status and not rank.ended else None,
        "asks": asks,
        "step": _number(rank.step),
        "done": done,
        "total": total,
        "last": {name: _number(value) for name, value in rank.last.items()},
        "samples_per_s": _number(rank.samples_per_s),
        "idle": round(rank.idle, 3),
    }


def _number(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return value if value is not None and isfinite(value) else None
