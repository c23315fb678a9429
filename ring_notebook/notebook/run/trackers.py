"""Hands what a run has logged to other tools: files, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from base64 import b64decode
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.notebook.record.logged_rows import MetricRow
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.protocol.records import HISTOGRAM


def to_csv(record: RunRecord, path: str | Path) -> Path:
    """Write every logged row to ``path``: rank, time, step and a column for each metric. Raises OSError."""
    rows = record.metrics()
    names = rows.names  # once: it looks through all rows
    target = Path(path)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "time", "step", *names])
        for row in rows:
            values = (row.values.get(name, "") for name in names)
            writer.writerow([row.rank, f"{row.time:.6f}", row.step, *values])
    return target


def to_media(record: RunRecord, folder: str | Path = "") -> Path:
    """Write what `ring.log` was given as image, figure, histogram or text to files of ``folder``. Raises OSError."""
    target = Path(folder) if folder else record.directory / "media"
    make_private_folder(target)
    for name, content in _files(record):
        with open_private(target / name, "wb") as file:
            file.write(content)
    return target


def _files(record: RunRecord) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file; a name has no slash, even if the metric's name has."""
    for one in record.media():
        assert one.logged is not None
        kind, name, step = one.logged
        short = re.sub(r"[^\w.-]+", "_", name).lstrip(".")[:80] or kind
        stem = f"{short}-step-{step}-rank-{one.ranks[0]}"
        if HISTOGRAM in one.data:
            yield f"{stem}.json", json.dumps(one.data[HISTOGRAM]).encode()
        elif "image/png" in one.data:
            yield f"{stem}.png", b64decode(one.data["image/png"])
        else:
            yield f"{stem}.txt", one.data["text/plain"].encode()


def to_tensorboard(record: RunRecord, directory: str | Path = "runs") -> Path:
    """Write the run as event files below ``directory``: of several ranks a TensorBoard run for each.

    Images, figures, histograms and texts of `ring.log` are the rank's own; hyper-parameters are common to all. Raises
    ModuleNotFoundError where TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install TensorBoard: `pip install tensorboard`") from None
    top = Path(directory) / (record.name or record.run)
    writers: dict[int, Any] = {}

    def add(rank: int, time: float, step: int, summary: Any) -> None:
        if rank not in writers:
            writers[rank] = EventFileWriter(str(top if record.size == 1 else top / f"rank {rank}"))
        writers[rank].add_event(Event(wall_time=time, step=step, summary=summary))

    def shown(one: Displayed, name: str) -> Any:
        if numbers := one.data.get(HISTOGRAM):
            low, high = numbers["edges"][0], numbers["edges"][-1]
            buckets = {"bucket": numbers["counts"], "bucket_limit": numbers["edges"][1:]}
            histogram = HistogramProto(min=low, max=high, num=sum(numbers["counts"]), **buckets)
            return Summary(value=[Summary.Value(tag=name, histo=histogram)])
        if "image/png" in one.data:
            image = Summary.Image(encoded_image_string=b64decode(one.data["image/png"]))
            return Summary(value=[Summary.Value(tag=name, image=image)])
        return text_pb(name, one.data["text/plain"])

    for row in record.metrics():
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        add(row.rank, row.time, row.step, Summary(value=values))
    for step, when, named in _changed(record):
        add(
            0, when, step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in named.items()])
        )
    for one in record.media():
        if one.logged is not None:
            add(one.ranks[0], record.started, one.logged.step, shown(one, one.logged.name))
    if params := {name: one if isinstance(one, int | float | str) else str(one) for name, one in record.params.items()}:
        for rank in [*writers]:
            add(rank, record.started, 0, hparams_pb(params, trial_id=record.run))
    for writer in writers.values():
        writer.close()
    return top


def to_wandb(record: RunRecord, **options: Any) -> Any:
    """Log the run to Weights & Biases; ``options`` are those of ``wandb.init``. Returns the finished wandb run.

    The config is the hyper-parameters, the metrics are the means of the ranks by step. Of images, figures, histograms
    and texts the first rank's at a step count; images need Pillow.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install it: `pip install wandb`") from None
    there = wandb.init(**{"name": record.title, "config": record.params, "tags": list(record.labels.tags), **options})
    steps: dict[int, dict[str, Any]] = dict(_means(record))
    for step, _, named in _changed(record):
        steps.setdefault(step, {}).update(named)
    for one in record.media():
        if one.logged is not None:
            steps.setdefault(one.logged.step, {}).setdefault(one.logged.name, _for_wandb(wandb, one))
    for step in sorted(steps):
        there.log(steps[step], step=step)
    there.finish()
    return there


def _for_wandb(wandb: Any, one: Displayed) -> Any:
    if numbers := one.data.get(HISTOGRAM):
        return wandb.Histogram(np_histogram=(numbers["counts"], numbers["edges"]))
    if "image/png" in one.data:
        from PIL import Image

        return wandb.Image(Image.open(io.BytesIO(b64decode(one.data["image/png"]))))
    return wandb.Html(f"<pre>{escape(one.data['text/plain'])}</pre>")


def to_mlflow(record: RunRecord, **options: Any) -> str:
    """Log the run to MLflow; ``options`` are those of ``mlflow.start_run``. Returns the id of MLflow's run.

    The metrics are the means of the ranks by step; values that are no numbers are left out. The files of `to_media`
    are artifacts in ``media``.
    """
    try:
        import mlflow
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install it: `pip install mlflow`") from None
    # Where Weights & Biases has words, MLflow has pairs: a tag of ours is one without a value.
    tags = {**dict.fromkeys(record.labels.tags, ""), **(options.pop("tags", None) or {})}
    with mlflow.start_run(**{"run_name": record.title, "tags": tags, **options}) as there:
        mlflow.log_params(record.params)
        for step, values in _means(record):
            mlflow.log_metrics({name: value for name, value in values.items() if math.isfinite(value)}, step=step)
        for step, _, named in _changed(record):
            mlflow.log_metrics(named, step=step)
        if record.media():
            with TemporaryDirectory() as folder:
                mlflow.log_artifacts(str(to_media(record, folder)), "media")
        run_id: str = there.info.run_id
    return run_id


def _changed(record: RunRecord) -> Iterator[tuple[int, float, dict[str, float]]]:
    """The step, the time and the numbers of each change of knobs: ``knob/lr``."""
    for one in record.changed():
        named = {f"knob/{name}": float(value) for name, value in one.values.items() if not isinstance(value, str)}
        if named:
            yield one.step, one.time, named


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
