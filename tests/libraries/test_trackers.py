"""A run handed over to wandb, MLflow and TensorBoard, whose own readers then find it; all of it on disk, offline.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ring_notebook.core import metrics
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.trackers import to_mlflow, to_tensorboard, to_wandb
from ring_notebook.protocol.records import MetricBatch, Params, encode

MEANS = [(step, 1 / (step + 1) + 0.5) for step in range(5)]  # of two ranks, the second 1.0 higher
_BLOCK, _FULL, _LAST = 32768, 1, 4


@pytest.fixture
def run(tmp_path: Path) -> RunLog:
    """Two ranks, five steps; the third accuracy is no number."""
    log = RunLog(tmp_path / "r1", "r1", "digits", 2, "EPOCHS = 3\n", {}, {})
    for rank in range(2):
        rows = array("d")
        for step in range(5):
            rows.extend((time.time(), step, 1 / (step + 1) + rank, math.nan if step == 2 else 0.5))
        log.put(encode([MetricBatch("r1", rank, ("loss", "accuracy"), rows)]))
    metrics.begin()
    given = {"image": np.zeros((4, 6)), "histogram": np.arange(9.0), "text": {"note": "<b>"}}
    metrics.log(step=2, **given)
    log.put(encode(metrics.drain_shown("r1", 0)))
    log.put(encode([Params("r1", 0, {"lr": 0.1, "optimizer": "SGD"})]))
    log.finish("ok")
    return log


def test_tensorboard(run: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By this name TensorBoard is told to leave TensorFlow alone. It would take the folder tests/tensorflow for it.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = to_tensorboard(run, tmp_path / "boards")
    assert folder == tmp_path / "boards" / "digits"
    for rank in range(2):
        events = accumulator.EventAccumulator(str(folder / f"rank {rank}"))
        events.Reload()
        assert events.Tags()["scalars"] == ["loss", "accuracy"]
        found = [(one.step, one.value) for one in events.Scalars("loss")]
        assert found == [(step, pytest.approx(1 / (step + 1) + rank)) for step in range(5)]
    events = accumulator.EventAccumulator(str(folder / "rank 0"))
    events.Reload()
    (image,), (histogram,) = events.Images("image"), events.Histograms("histogram")
    assert (image.step, image.encoded_image_string[:4]) == (2, b"\x89PNG")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (2, 9, 8)
    (hyper_parameters,) = events.PluginTagToContent("hparams").values()
    assert b"optimizer" in hyper_parameters
    assert b"SGD" in hyper_parameters
    (text,) = events.Tensors("note")
    assert text.tensor_proto.string_val == [b"<b>"]


def test_wandb(run: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    there = to_wandb(run, mode="offline", dir=str(tmp_path), project="ring")
    wandb.teardown()  # ends its process
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{there.id}.wandb")
    records = list(wandb_records(file))
    (about,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    config = {item.key: item.value_json for item in about.config.update}
    assert about.display_name == "digits"
    assert (config["lr"], config["optimizer"], config["EPOCHS"]) == ("0.1", '"SGD"', "3")
    rows, kinds = [], {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            rows.append((int(row["_step"]), float(row["loss"])))
            typed = [item for item in record.history.item if "_type" in item.nested_key]
            kinds |= {item.nested_key[0]: json.loads(item.value_json) for item in typed}
    assert rows == [(step, pytest.approx(loss)) for step, loss in MEANS]
    assert kinds == {"image": "image-file", "histogram": "histogram", "note": "html-file"}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of wandb's file: frames as those of LevelDB's log, in blocks, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:  # no room for a frame in what is left of this block
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow asks of SQLAlchemy
def test_mlflow(run: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("ring")
    run_id = to_mlflow(run, tags={"kind": "test"})
    client = mlflow.tracking.MlflowClient()
    there = client.get_run(run_id)
    assert there.info.status == "FINISHED"
    assert there.info.run_name == "digits"
    assert there.data.params == {"EPOCHS": "3", "lr": "0.1", "optimizer": "SGD"}
    assert there.data.tags["kind"] == "test"
    found = [(one.step, one.value) for one in client.get_metric_history(run_id, "loss")]
    assert sorted(found) == [(step, pytest.approx(loss)) for step, loss in MEANS]
    files = sorted(one.path for one in client.list_artifacts(run_id, "media"))
    assert files == [
        "media/histogram-step-2-rank-0.json",
        "media/image-step-2-rank-0.png",
        "media/note-step-2-rank-0.txt",
    ]
    assert sorted(one.step for one in client.get_metric_history(run_id, "accuracy")) == [0, 1, 3, 4]  # 2 is NaN
