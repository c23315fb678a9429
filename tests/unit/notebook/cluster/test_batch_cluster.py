"""A cluster in a batch job that an earlier kernel has kept."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from ring_notebook.launch.batch_commands import JobState
from ring_notebook.notebook.cluster import batch


def test_a_kept_job_whose_batch_system_was_silent_is_warned_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier kernel's job: when it began is asked again until there is an answer."""
    answers = iter([None, None])
    running = JobState("runs", "R", start=time.time() - 3600)
    job = SimpleNamespace(name="PBS job 7", kept_before=True, busy=0.0, request=SimpleNamespace(seconds=3601))
    job.state = lambda: next(answers, running)
    monkeypatch.setattr(batch, "_PERIOD", 0.01)
    monkeypatch.setattr(batch, "_PERIODS_OF_QUERIES", ((math.inf, 0.01),))
    monkeypatch.setattr(batch.own_batch_job, "walltime", lambda: SimpleNamespace(end=None))
    told = threading.Event()
    followed = batch.BatchCluster(
        job,  # type: ignore[arg-type]
        use=lambda _: None,
        tell=lambda _: told.set(),
        busy=lambda: False,
        release=lambda _: None,
        keep=lambda _: "",
    )
    followed.begin(SimpleNamespace(death=None, write_checkpoint=lambda: None))  # type: ignore[arg-type]
    try:
        assert told.wait(10)
    finally:
        followed._closed.set()
        followed._thread.join()
