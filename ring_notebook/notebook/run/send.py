"""Sends a cell to engines of a cluster as a new run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.hardware import cores
from ring_notebook.notebook.deferred_interrupt import DeferredInterrupt
from ring_notebook.notebook.engines import Engines
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.answering import Answering
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.spoken_name import spoken_name

_RANK_SIDE = "ring_notebook.engine.runner:execute"


def send(
    engines: Engines,
    cluster: str,
    source: str,
    ranks: Sequence[int],
    *,
    name: str,
    timeout: float,
    first_line: int,
    options: Mapping[str, Any],
    only: Sequence[int] = (),
    batch: Mapping[str, Any] | None = None,
) -> Run:
    """Send ``source`` to engines of the cluster of this name; ``ranks[i]`` is rank i of the run. Returns at once.

    With ``only`` just these engines execute it; the others take part in the run and do nothing. ``batch`` is the batch
    job of the engines, and its end. An interrupt of this process meanwhile stops the run as soon as it has been sent.
    """
    run, folder = _run_id(), Path(config().runs_dir).absolute()
    chosen = engines.part(ranks)
    log = RunLog(
        folder / run,
        run,
        name or spoken_name(folder),
        len(ranks),
        source,
        {**options, "first_line": first_line},
        {
            "cluster": cluster,
            "engines": len(engines.all),
            "ranks": list(ranks),
            "hosts": sorted({engine.host for engine in engines.all}),
            "cores": cores(),
            "gpus": [engine.gpu for engine in chosen.all if engine.gpu],
            "directory": os.getcwd(),
            **({"batch": dict(batch)} if batch else {}),
        },
    )
    # From a clock that nobody sets, so that epochs also increase to the next kernel of this host that attaches.
    epoch = time.monotonic_ns() // 1_000_000
    flags = bool(options.get("timeline")), bool(options.get("horovod"))
    args = (run, epoch, list(ranks), source, first_line, *flags, list(only), sorted(engines.deaths()))
    questions = Answering(chosen)
    with DeferredInterrupt() as interrupt:  # else ranks would execute a cell that no run of this kernel knows
        futures = chosen.submit(_RANK_SIDE, args, range(len(ranks)), log.put, questions.put)
        sent = Run(chosen, log, futures, timeout=timeout, questions=questions)
    if interrupt.came:
        sent.interrupt()
    return sent


def _run_id() -> str:
    now = time.time()
    # To the millisecond, so that ids sort in the order in which runs were started.
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03d}{uuid.uuid4().hex[:2]}"
