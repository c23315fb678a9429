"""Sends a cell to engines of a cluster as a new run, and names runs without a name."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_notebook.files.checkpoint_folder import CHECKPOINTS
from ring_notebook.files.run_folders import new_run_id, runs_directory
from ring_notebook.machine.hardware import cores
from ring_notebook.notebook.deferred_interrupt import DeferredInterrupt
from ring_notebook.notebook.engines import Engines
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.answering import Answering
from ring_notebook.notebook.run.catalogue import find, resumes_from, with_inherited
from ring_notebook.notebook.run.knob_changes import begins_with, changes_of, pauses_at
from ring_notebook.notebook.run.run import Run
from ring_notebook.protocol.records import encode
from ring_notebook.protocol.ringtrain_options import CellOptions, CellRequest

_RANK_SIDE = "ring_notebook.engine.runner:execute"


def send(
    engines: Engines,
    cluster: str,
    source: str,
    ranks: Sequence[int],
    name: str,
    options: CellOptions,
    only: Sequence[int],
    batch: Mapping[str, Any],
) -> Run:
    """Send ``source`` to engines of the cluster of this name; ``ranks[i]`` is rank i of the run. Returns at once.

    With ``only`` just these engines execute it; the others take part in the run and do nothing. ``batch`` is the batch
    job of the engines, and its end. An interrupt of this process meanwhile stops the run as soon as it has been sent.
    Raises RingError if it cannot resume or replay another run, as ``options`` ask.
    """
    run, folder = new_run_id(), runs_directory()
    resume = resumes_from(options.name, options.cell_id) if options.resume else ""
    changes = [*changes_of(options.replay), *pauses_at(options.pause_at), *begins_with(options.knobs, options.who)]
    chosen = engines.part(ranks)
    log = RunLog(
        folder / run,
        run,
        name or spoken_name(folder),
        len(ranks),
        source,
        with_inherited(options.kept()) | ({"only": [*only]} if only else {}),
        {
            "cluster": cluster,
            "engines": len(engines.all),
            "ranks": list(ranks),
            "hosts": sorted({engine.host for engine in chosen.all}),
            "cores": cores(),
            "gpus": [engine.gpu for engine in chosen.all if engine.gpu],
            "directory": os.getcwd(),
            **({"batch": dict(batch)} if batch else {}),
        },
    )
    # A monotonic clock, so that generations also increase when another kernel of this host attaches.
    generation = time.monotonic_ns() // 1_000_000
    request = CellRequest(
        run,
        generation,
        list(ranks),
        source,
        CellOptions.of(log.options),
        only=list(only),
        lost=sorted(engines.deaths()),
        checkpoints=str(folder / run / CHECKPOINTS),
        resume=resume,
        gradients=encode(list(find(options.repeats).gradients())) if options.repeats else b"",
        changes=changes,
    )
    questions = Answering(chosen)
    with DeferredInterrupt() as interrupt:  # else ranks would execute a cell that no run of this kernel knows
        futures = chosen.submit(_RANK_SIDE, [request], range(len(ranks)), log.put, questions.put)
        sent = Run(chosen, log, futures, timeout=options.timeout, questions=questions)
    if interrupt.came:
        sent.interrupt()
    return sent


_FIRST = (
    "amber bold brave bright brisk calm clear clever cool copper coral cosmic crisp curious daring deep dusty eager "
    "early easy fair fast fine fresh gentle glad golden grand green happy honest humble jolly keen kind late light "
    "lively lucky mellow merry mild misty neat noble olive patient plain polite proud quick quiet rapid ready rosy "
    "ruby rustic sharp silent silver simple smart smooth snowy solid steady sunny swift tender tidy tiny velvet "
    "vivid warm wild wise young"
)
_SECOND = (
    "acorn ant aspen badger bay beach bear beech birch bison bloom breeze brook canyon cedar cliff cloud comet "
    "coral crane creek crow dawn deer delta dove dune eagle elm ember falcon fern field finch fjord forest fox "
    "frost garden glade grove harbor hare hawk hazel heron hill island ivy jay lake lark leaf lily lynx maple marsh "
    "meadow moon moss mountain newt oak ocean orchid otter owl panda pearl pebble pine plover pond puffin quail "
    "rain raven reef ridge river robin sage seal shore sky snow sparrow spring star stone storm stream summit swan "
    "thistle tide trail trout valley violet wave willow wind wolf wren"
)


def spoken_name(folder: Path) -> str:
    """A name for the next run in ``folder``, such as ``amber-otter-12``; the number counts the runs there."""
    draw = random.SystemRandom()  # not the generator that the notebook has seeded
    try:
        count = sum(entry.is_dir() for entry in os.scandir(folder))
    except OSError:
        count = 0
    return f"{draw.choice(_FIRST.split())}-{draw.choice(_SECOND.split())}-{count + 1}"
