"""Ranks in the tasks of a Spark job: ``ring_notebook.spark.run(fn, num_proc=4)`` (Horovod: ``horovod.spark.run``).

Each rank is a process beside a task of one barrier stage, so that all start or none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

from ring_notebook.launch.lent_places import run_there
from ring_notebook.launch.remote.relay import Relay, Where, introduce, serve

__all__ = ["run"]

_SECONDS_TO_END = 5.0
_MOST_STAGES = 8


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    min_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks 0..num_proc-1, each in a task of the active Spark session, results by rank.

    ``num_proc`` is by default ``spark.default.parallelism``. A rank computes with ``spark.task.cpus`` threads, on the
    GPUs of its task. ``env``, ``min_np`` and errors are as in `ring_notebook.run`; RingError when Spark has no room for
    the tasks.
    """
    return run_there(SparkPlaces(), fn, args, kwargs, num_proc, env, min_np)


def places_at(_address: str) -> SparkPlaces:
    """The places of the active Spark session, or of a new one with Spark's own settings."""
    return SparkPlaces()


class SparkPlaces:
    """An `Engine`: a barrier stage of the active Spark session, with a task for each place."""

    name = "Spark"

    def __init__(self) -> None:
        self._context = SparkSession.builder.getOrCreate().sparkContext
        self.most = self._context.defaultParallelism
        """The number of tasks that Spark proposes."""
        settings = self._context.getConf()
        self.threads = int(settings.get("spark.task.cpus", "1") or "1")
        self.address = str(settings.get("spark.driver.host", "127.0.0.1"))
        self._tag = f"ring-notebook-{id(self)}"
        self._thread: threading.Thread | None = None
        self._problem = ""

    def begin(self, size: int, relay: Relay) -> None:
        self._thread = threading.Thread(target=self._run, args=(size, relay), name="ring-spark", daemon=True)
        self._thread.start()

    def _run(self, size: int, relay: Relay) -> None:
        """Run the stage, until all of its tasks are in processes that have introduced themselves.

        A task can send nothing before it ends. So tasks in new processes end, and all others with them; the next stage
        runs in the same processes, which Spark keeps.
        """
        known: set[str] = set()
        try:
            self._context.addJobTag(self._tag)
            for _ in range(_MOST_STAGES):
                task = _task(frozenset(known), relay.where)
                found = self._context.parallelize(range(size), size).barrier().mapPartitions(task).collect()
                if not found:  # they have served
                    return
                for certificate in found:
                    relay.admit(certificate)
                known.update(found)
            self._problem = "Spark runs each task in a new process; set spark.python.worker.reuse=true"
        except Exception as error:
            lines = str(error).strip().splitlines()
            self._problem = next((line for line in lines if "Exception" in line or "Error" in line), lines[0])

    def trouble(self) -> str:
        return self._problem

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)
            self._context.cancelJobsWithTag(self._tag)  # where `serve` could not begin
            self._thread.join()
            self._thread = None


def _task(known: frozenset[str], where: Where) -> Callable[[Iterator[int]], Iterator[str]]:
    """A task of the stage: serves the relay if all tasks' processes are ``known``, else returns its certificate."""

    def task(_: Iterator[int]) -> Iterator[str]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        own = introduce()
        if not known.issuperset(context.allGather(own)):
            yield own
            return
        gpus = context.resources().get("gpu")
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        serve(*where)

    return task
