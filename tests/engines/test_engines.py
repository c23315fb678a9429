"""Ranks on the real Ray, Dask and Spark, in an environment of their own: ``make test-engines``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.programs import die, fail, grow, train
from harness.two_hosts import TwoHosts, hosts_or_skip, pids_in
from harness.waiting import until
from ring_notebook import RunFailed
from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster

for package in ("distributed", "pyspark", "ray"):
    pytest.importorskip(package, reason="lives in an environment of its own: make test-engines")
# Libraries that we do not keep have warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")
Run = Callable[..., list[Any]]


@contextlib.contextmanager
def on_dask() -> Iterator[tuple[Run, str]]:
    from distributed import Client, LocalCluster

    from ring_notebook import dask

    options = {"processes": True, "dashboard_address": None, "host": "127.0.0.1"}
    with LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster, Client(cluster) as client:
        yield lambda fn, **more: dask.run(client, fn, **more), cluster.scheduler_address.replace("tcp", "dask")


@contextlib.contextmanager
def on_ray() -> Iterator[tuple[Run, str]]:
    import ray

    from ring_notebook import ray as face

    ray.init(num_cpus=2, include_dashboard=False)
    try:
        yield lambda fn, num_proc=2, **more: face.run(fn, num_proc=num_proc, **more), "ray"
    finally:
        ray.shutdown()


@contextlib.contextmanager
def on_spark() -> Iterator[tuple[Run, str]]:
    if not shutil.which("java"):
        pytest.skip("NOT TESTED on Spark: no Java here")
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from ring_notebook import spark

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    loopback = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = loopback.getOrCreate()
    try:
        yield lambda fn, num_proc=2, **more: spark.run(fn, num_proc=num_proc, **more), "spark"
    finally:
        session.stop()
        gateway = SparkContext._gateway  # PySpark keeps its Java until Python ends
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)


@pytest.mark.parametrize("engine", [on_dask, on_ray, on_spark])
def test_an_engine(engine: Callable[[], contextlib.AbstractContextManager[tuple[Run, str]]]) -> None:
    """Trained alike, twice in the same processes; failures as ever; a cluster of a notebook."""
    with engine() as (run, address):
        for steps in (10, 3):
            found = run(train, kwargs={"steps": steps})
            assert [one[:3] for one in found] == [(0, 2, 1), (1, 2, 1)]
            assert found[0][3] == found[1][3]
        with pytest.raises(ValueError, match="of rank 1"):
            run(fail)
        with pytest.raises(RunFailed, match=r"rank 1 .* killed by SIGKILL"):
            run(die)
        assert len(run(os.getpid, min_np=1)) == 2
        with Cluster(2, on=address) as cluster:
            cluster.run("import torch; x = ring.allreduce(torch.ones(3), op=ring.Sum)").wait()
            assert cluster.pull("x", 1).tolist() == [2, 2, 2]
            cluster.run("kept = ring.rank()").wait()
            os.kill(cluster.status()[1].pid, signal.SIGKILL)
            assert cluster.heal() == [1]
            assert cluster.pull("kept") == 0


def test_jobs_on_ray_grow(tmp_path: Path) -> None:
    """Two of three CPUs are taken when the job begins; its other ranks come when they are free."""
    import ray

    from ring_notebook.ray import ElasticRayExecutor

    class Other:
        def is_there(self) -> bool:
            return True

    ray.init(num_cpus=3, include_dashboard=False)
    try:
        other = ray.remote(num_cpus=2)(Other).remote()
        assert ray.get(other.is_there.remote())
        flag = tmp_path / "begun"

        def free() -> None:
            until(flag.exists, 100)
            ray.kill(other)

        waits = threading.Thread(target=free)
        waits.start()
        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=3))
        executor.start()
        found = executor.run(functools.partial(grow, str(flag), 3))
        waits.join()
        assert sorted(found) == [(0, 3), (1, 3), (2, 3)]
    finally:
        ray.shutdown()


def test_too_few_places() -> None:
    with on_dask() as (run, _), pytest.raises(RingError, match="expected 3 workers, one for each rank, got 2"):
        run(os.getpid, num_proc=3)
    with on_ray() as (run, _), pytest.raises(RingError, match="each needs 1 CPU, and the whole cluster has 2 CPU"):
        run(os.getpid, num_proc=3)


def test_places_of_ray_serve_job_after_job() -> None:
    from ring_notebook.ray import RayExecutor

    with on_ray():
        executor = RayExecutor(num_workers=2, env_vars={"COLOUR": "red"})
        executor.start()
        try:
            assert executor.run(os.getenv, ["COLOUR"]) == ["red", "red"]
            assert executor.run(os.getenv, ["COLOUR"], env={"COLOUR": "blue"}) == ["blue", "blue"]
        finally:
            executor.shutdown()


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip()


OVER_HOSTS = {
    "dask": (
        ["-m", "distributed.cli.dask_scheduler", "--host", "10.77.0.1", "--port", "8786", "--no-dashboard"],
        ["-m", "distributed.cli.dask_worker", "tcp://10.77.0.1:8786", "--nworkers=1", "--nthreads=1", "--no-dashboard"],
        """
        from distributed import Client
        from ring_notebook import dask
        client = Client("tcp://10.77.0.1:8786")
        client.wait_for_workers(2)
        run = lambda fn: dask.run(client, fn)
        """,
    ),
}


@pytest.mark.parametrize("engine", list(OVER_HOSTS))
def test_over_two_hosts(engine: str, hosts: TwoHosts, tmp_path: Path) -> None:
    head, worker, connect = OVER_HOSTS[engine]
    script = tmp_path / "script.py"
    script.write_text(
        f"import json, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{textwrap.dedent(connect)}\n"
        "from engines.programs import train\n"
        "if __name__ == '__main__':\n    print(json.dumps(run(train)))\n"
    )
    started = [
        subprocess.Popen(["ip", "netns", "exec", f"{hosts.prefix}-{where}", sys.executable, *what])
        for where, what in (("a", head), ("a", worker), ("b", worker))
    ]
    try:
        sent = hosts.bytes_sent(1)
        found = json.loads(hosts.on_first([sys.executable, str(script)], 200).splitlines()[-1])
        assert [one[:2] for one in found] == [[0, 2], [1, 2]]
        assert found[0][3] == found[1][3]
        assert hosts.bytes_sent(1) > sent
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)
        deadline = time.monotonic() + 20
        while any(engine in text for text in hosts.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert pids_in(f"{hosts.prefix}-b")
