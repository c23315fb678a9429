"""Cells that show the panel of ranks that do not run: what they would send, at sizes this machine has no cores for."""

from __future__ import annotations

__all__ = ["BEGINNING", "BROKEN", "LOGICAL", "MANY", "REPORT", "STUCK", "TRAINING", "WIDE"]

_SOURCE = (
    "import torch\n"
    "model, optimizer, loader = ring.prepare(model, optimizer, loader)\n"
    "for images, labels in ring.track(loader):\n"
    "    loss = train_step(images, labels)\n"
    "    ring.log(loss=loss)\n"
    "ring.allreduce(loss, name='late')\n"
)
_HEAD = """
import math, random, time
from array import array
from pathlib import Path
from ring_notebook.notebook.panel.panel import Panel
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.protocol.records import Ended, Load, MetricBatch, Output, Status, encode

source, about = SOURCE, {{"cores": 128, "hosts": ["here"]}}
log = RunLog(Path("{run}"), "{run}", "{name}", {size}, source, {{}}, about, time.time() - 42)

def settle():
    # All records are taken in, and no rank falls silent however long somebody looks.
    while log.taken < log.received:
        time.sleep(0.01)
    for rank in log._state._ranks.values():
        rank.moved = rank.heard = time.time() + 3600
""".replace("SOURCE", repr(_SOURCE))
# Four hundred steps of forty seconds; the last rank is slower than the others, and the data of rank 2 is harder.
_ROWS = """
random.seed(7)
steps, slow, odd = 400, {size} - 1, 2

def facts(rank):
    busy = 38.0 if rank == slow else 27.0
    times = {{"training": 40.0, "communication": 40 - busy, "waiting": (40 - busy) * 0.85, "data_wait": 1.2}}
    return {{**times, "on_cpu": busy, "line": 0}}

for rank in range({size}):
    rows, val = array("d"), array("d")
    for step in range(steps):
        now = log.started + 2 + step / 10
        loss = abs(2.3 * math.exp(-step / 60) + 0.08 + 0.06 * math.exp(-step / 200) * random.gauss(0, 1))
        loss += 0.35 if rank == odd and {size} > 2 else 0
        rate = 64.0 * (1 + 0.1 * math.sin(step / 15))
        rows.extend((now, step, loss, min(0.99, 1 - loss / 3.1), 1e-3 * (1 - step / steps), step // 100, rate))
        if step % 50 == 49:
            val.extend((now, step, 2.2 * math.exp(-step / 70) + 0.16))
    log.put(encode([
        MetricBatch(log.run, rank, ("loss", "accuracy", "lr", "epoch", "samples"), rows),
        MetricBatch(log.run, rank, ("val_loss",), val),
        Status(log.run, rank, log.started + 42, line=4, progress=(400, 1000), extra=facts(rank)),
        *(Load(log.run, rank, log.started + second, {{
            "cpu": 96 + 3 * math.sin(second / 3 + rank) - 25 * (rank == slow), "memory": (2.1 + 0.2 * rank % 1) * 2**30,
            "gpu": 88 + 8 * math.sin(second / 5 + rank), "gpu_memory": 31e9 + second * 1e7, "disk": 2e6, "network": 4e6,
        }}) for second in range(42)),
        *([Output(log.run, rank, "stdout", "epoch 3 done\\n")] if rank == 0 else []),
    ]))
settle()
for rank in log._state._ranks.values():
    rank.progress_start = (time.time() - 40, 0, 1000)
"""
_SHOW = "Panel(log, stop=lambda: None).show()\n"
TRAINING = f"{_HEAD}{_ROWS}{_SHOW}"
REPORT = f"""{_HEAD}{_ROWS}
for rank in range({{size}}):
    log.put(encode([Ended(log.run, rank, "ok", 42.0, facts(rank))]))
panel = Panel(log)
panel.show()
log.finish("ok")
log.summary["seconds"] = 42.0
panel.close()
"""
# A learning rate that is too high: the loss of one rank is no number from step 151 on.
BROKEN = TRAINING.replace("(now, step, loss,", "(now, step, math.nan if step > 150 and rank == 1 else loss,")
# Long names and more metrics than have room: columns are folded away.
WIDE = (
    TRAINING.replace('"accuracy", "lr"', '"validation/top5_accuracy", "scheduler/learning_rate"')
    .replace('("val_loss",)', '("validation/cross_entropy", "validation/perplexity")')
    .replace("2.2 * math.exp(-step / 70) + 0.16)", "2.2 * math.exp(-step / 70) + 0.16, 9.0)")
)
# Eight logical ranks, each with its loss; the data of logical rank 5 is harder.
LOGICAL = (
    TRAINING.replace(
        "        rows.extend((now, step, loss,",
        "        for turn in range(rank * 8 // {size}, (rank + 1) * 8 // {size}):\n"
        "            noisy = loss * random.uniform(0.9, 1.1) + 0.35 * (turn == 5)\n"
        "            rows.extend((now, step, turn, noisy,",
    )
    .replace('("loss", "accuracy"', '("logical_rank", "loss", "accuracy"')
    .replace(
        "for rank in range({size}):",
        'log.put(encode([Params(log.run, 0, {{"logical_ranks": 8}})]))\nfor rank in range({size}):',
        1,
    )
    .replace("Output, Status, encode", "Output, Params, Status, encode")
)
STUCK = f"""{_HEAD}{_ROWS}
waiting = {{{{"operation": "allreduce", "name": "late", "sequence": 401, "seconds": 12.0, "missing": [1]}}}}
for rank in range({{size}}):
    late = rank == 1
    status = Status(log.run, rank, 0, 4 if late else 6, None if late else waiting, (400, 1000), facts(rank))
    status.extra["calls"] = 400 if late else 401
    log._state.apply(status, log.started + 30)
    log._state._ranks[rank].moved = log.started + 30
{_SHOW}"""
BEGINNING = f"""{_HEAD}
for rank in range({{size}}):
    log.put(encode([Status(log.run, rank, log.started, line=1 if rank else 2)]))
{_SHOW}"""
# Fourteen metrics in three groups, with units, and pictures.
MANY = f"""{_HEAD}
import numpy as np
from ring_notebook.core import metrics
metrics.begin()
numbers = np.random.default_rng(0)
metrics.log(step=399, image={{{{"input": numbers.random((16, 16, 3))}}}}, text={{{{"sample": "<b>to be</b> or"}}}},
            histogram={{{{"weights": numbers.normal(size=1000)}}}})
log.put(encode(metrics.drain_shown(log.run, 0)))
names = ("loss", "accuracy", "lr", "step_ms", *(f"grad/layer_{{{{index}}}}" for index in range(1, 10)), "data/queue")
for rank in range({{size}}):
    rows = array("d")
    for step in range(400):
        rows.extend((log.started + 2 + step / 10, step))
        rows.extend(math.exp(-step / (20 * index)) + random.gauss(0, 0.05) for index in range(1, len(names) + 1))
        rows.extend((step // 100, 64))
    log.put(encode([MetricBatch(log.run, rank, (*names, "epoch", "samples"), rows, {{{{"data/queue": "batches"}}}})]))
settle()
panel = Panel(log, stop=lambda: None)
panel.show()
"""
