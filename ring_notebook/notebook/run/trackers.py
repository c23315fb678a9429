"""Hands the metrics of a run to other tools: files of CSV, pandas, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ring_notebook.notebook.record.logged_rows import MetricRow
from ring_notebook.notebook.record.run_record import RunRecord


def to_csv(record: RunRecord, path: str | Path) -> Path:
    """Write every logged row to ``path``: rank, time, step and a column for each metric. Raises OSError."""
    rows = record.metrics()
    target = Path(path)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "time", "step", *rows.names])
        for row in rows:
            values = (row.values.get(name, "") for name in rows.names)
            writer.writerow([row.rank, f"{row.time:.6f}", row.step, *values])
    return target


def to_tensorboard(record: RunRecord, directory: str | Path = "runs") -> Path:
    """Write the run as event files below ``directory``: of several ranks a TensorBoard run for each.

    Raises ModuleNotFoundError where TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install TensorBoard: `pip install tensorboard`") from None
    top = Path(directory) / (record.name or record.run)
    writers: dict[int, Any] = {}
    for row in record.metrics():
        if row.rank not in writers:
            writers[row.rank] = EventFileWriter(str(top if record.size == 1 else top / f"rank {row.rank}"))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        writers[row.rank].add_event(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))
    for writer in writers.values():
        writer.close()
    return top


def to_wandb(record: RunRecord, **options: Any) -> Any:
    """Log the run to Weights & Biases; ``options`` are those of ``wandb.init``. Returns the finished wandb run.

    The config is the hyper-parameters, the metrics are the means of the ranks by step.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install it: `pip install wandb`") from None
    there = wandb.init(**{"name": record.title, "config": record.params, "tags": list(record.labels.tags), **options})
    for step, values in _means(record):
        there.log(values, step=step)
    there.finish()
    return there


def to_mlflow(record: RunRecord, **options: Any) -> str:
    """Log the run to MLflow; ``options`` are those of ``mlflow.start_run``. Returns the id of MLflow's run.

    The metrics are the means of the ranks by step; values that are no numbers are left out.
    """
    try:
        import mlflow
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install it: `pip install mlflow`") from None
    with mlflow.start_run(**{"run_name": record.title, **options}) as there:
        mlflow.log_params(record.params)
        for step, values in _means(record):
            mlflow.log_metrics({name: value for name, value in values.items() if math.isfinite(value)}, step=step)
        run_id: str = there.info.run_id
    return run_id


def _means(record: RunRecord) -> Iterator[tuple[int, dict[str, float]]]:
    """The mean over the ranks of each metric at each step, by step."""
    steps: dict[int, dict[str, list[float]]] = {}
    row: MetricRow
    for row in record.metrics():
        values = steps.setdefault(row.step, {})
        for name, value in row.values.items():
            values.setdefault(name, []).append(value)
    for step in sorted(steps):
        yield step, {name: sum(values) / len(values) for name, values in steps[step].items()}
