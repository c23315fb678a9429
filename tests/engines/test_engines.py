"""Ranks on the real Ray, Dask and Spark, in an environment of their own: ``make test-engines``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.programs import die, fail, grow_and_log, train
from harness.programs import executable
from harness.sniffer import listeners, recorded
from harness.two_hosts import ADDRESSES, NAMES, TwoHosts, hosts_or_skip, pids_in
from harness.waiting import until
from ring_notebook import RunFailed
from ring_notebook.errors import RingError
from ring_notebook.notebook.cluster.cluster import Cluster

for package in ("distributed", "pyspark", "ray"):
    pytest.importorskip(package, reason="lives in an environment of its own: make test-engines")
# Libraries that we do not keep have warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")
Run = Callable[..., list[Any]]
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray gives itself 30 s, too few on a busy machine


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
        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=3, verbose=2))
        executor.start()
        said: list[dict[str, int]] = []
        found = executor.run(functools.partial(grow_and_log, str(flag), 3), callbacks=[said.append])
        waits.join()
        assert sorted(found) == [(0, 3), (1, 3), (2, 3)]
        assert sorted(map(str, said)) == ["{'any rank': 0}", "{'any rank': 1}", "{'any rank': 2}", "{'rank': 0}"]
    finally:
        ray.shutdown()


def wait_to_be_cancelled(flag: str) -> None:
    """Both ranks sum until somebody ends them."""
    from ring_notebook.api import basics

    basics.init()
    while True:
        basics.barrier()
        Path(flag).touch()


def test_a_cancelled_job_of_spark_is_no_lost_machine(tmp_path: Path) -> None:
    flag = tmp_path / "begun"
    with on_spark() as (run, _):
        from pyspark import SparkContext

        def cancel() -> None:
            until(flag.exists, 100)
            SparkContext._active_spark_context.cancelAllJobs()

        waits = threading.Thread(target=cancel)
        waits.start()
        with pytest.raises(RunFailed, match=r"its place is lost: Spark: .*cancelled"):
            run(wait_to_be_cancelled, args=(str(flag),))
        waits.join()


def test_too_few_places() -> None:
    with on_dask() as (run, _), pytest.raises(RingError, match="expected 3 workers, one for each rank, got 2"):
        run(os.getpid, num_proc=3)
    with on_ray() as (run, _), pytest.raises(RingError, match="each needs 1 CPU, and the whole cluster has 2 CPU"):
        run(os.getpid, num_proc=3)


def test_places_of_ray_serve_job_after_job() -> None:
    from ring_notebook.ray import RayExecutor

    with on_ray():
        settings = RayExecutor.create_settings(timeout_s=60)
        executor = RayExecutor(settings, num_hosts=1, num_workers_per_host=2, env_vars={"COLOUR": "green"})
        executor.start(extra_env_vars={"COLOUR": "red"})
        try:
            assert executor.run(os.getenv, ["COLOUR"]) == ["red", "red"]
            assert executor.run(os.getenv, ["COLOUR"], env={"COLOUR": "blue"}) == ["blue", "blue"]
            said: list[dict[str, int]] = []
            assert executor.run(grow_and_log, [os.devnull, 2], callbacks=[said.append]) == [(0, 2), (1, 2)]
            assert said.count({"rank": 0}) == 1
            assert len(said) == 3
        finally:
            executor.shutdown()


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip()


TOKEN = "hf_a-token-in-the-environment"
RAY = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--object-store-memory=100000000"]
DASK = ["-m", "distributed.cli.dask_worker", "tcp://10.77.0.1:8786", "--nworkers=1", "--nthreads=1", "--no-dashboard"]
SPARK = ["org.apache.spark.deploy.worker.Worker", "-c", "1", "-m", "1g", "spark://10.77.0.1:7077", "--host"]
OVER_HOSTS = {
    "ray": (
        [
            ("a", [*RAY, "--head", "--node-ip-address=10.77.0.1", "--port=6379", "--include-dashboard=false"]),
            ("b", [*RAY, "--address=10.77.0.1:6379", "--node-ip-address=10.77.0.2"]),
        ],
        """
        import time, ray
        from ring_notebook.ray import run
        ray.init(address="10.77.0.1:6379", log_to_driver=False)
        while ray.cluster_resources().get("CPU", 0) < 2: time.sleep(0.5)
        """,
    ),
    "dask": (
        [
            ("a", ["-m", "distributed.cli.dask_scheduler", "--host", "10.77.0.1", "--port", "8786", "--no-dashboard"]),
            ("a", DASK),
            ("b", DASK),
        ],
        """
        from distributed import Client
        from ring_notebook import dask
        client = Client("tcp://10.77.0.1:8786")
        client.wait_for_workers(2)
        run = lambda fn: dask.run(client, fn)
        """,
    ),
    "spark": (
        [
            ("a", ["org.apache.spark.deploy.master.Master", "--host", "10.77.0.1", "--port", "7077"]),
            ("a", [*SPARK, "10.77.0.1"]),
            ("b", [*SPARK, "10.77.0.2"]),
        ],
        """
        from pyspark.sql import SparkSession
        from ring_notebook.spark import run as run_on_spark
        def run(fn):
            builder = SparkSession.builder.master("spark://10.77.0.1:7077").config("spark.ui.enabled", "false")
            here = builder.config("spark.driver.host", "10.77.0.1").config("spark.driver.bindAddress", "10.77.0.1")
            session = here.config("spark.executor.memory", "512m").getOrCreate()
            try:
                return run_on_spark(fn, num_proc=2)
            finally:
                session.stop()
        """,
    ),
    "pods": (
        [],
        """
        from ring_notebook import k8s
        run = lambda fn: k8s.run(fn, "app=train")
        """,
    ),
}
"""What runs on the hosts, and what connects to it. Pods have no API server here: `KUBECTL` takes its place."""
# `kubectl get pods ...`, and `kubectl exec --stdin train-a -- python3 ARGUMENTS...`, here in the namespaces of ring-a.
KUBECTL = """\
    #!/bin/sh
    case $1 in
        get) echo '{pods}' ;;
        exec)
            host=ring-${{3#train-}}; shift 5
            exec nsenter --target "$(cat {folder}/$host.pid)" --net --uts --mount {python} "$@" ;;
    esac
"""


def stand_in_for_kubectl(hosts: TwoHosts, folder: Path) -> None:
    pods = [
        {"metadata": {"name": f"train-{name[-1]}"}, "status": {"podIP": address}}
        for name, address in zip(NAMES, ADDRESSES, strict=True)
    ]
    text = textwrap.dedent(KUBECTL).format(pods=json.dumps({"items": pods}), folder=hosts.folder, python=sys.executable)
    executable(folder / "kubectl", text)


def listening(hosts: TwoHosts, host: str, pids: Collection[int]) -> set[int]:
    """The ports of ring-``host`` at which these processes listen."""
    return {one.port for one in listeners(f"{hosts.prefix}-{host}") if one.pid in pids}


def ranks_on(hosts: TwoHosts) -> list[int]:
    """The processes of ranks; places and agents have no rank."""
    found = []
    for pid in hosts.pids():
        with contextlib.suppress(OSError):
            if b"\0RING_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def program(engine: str) -> str:
    if engine != "spark":
        return sys.executable
    if not shutil.which("java"):
        pytest.skip("NOT TESTED on Spark: no Java here")
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / "spark-class")


@pytest.mark.timeout(1200)  # which engines need to start on a busy machine
@pytest.mark.parametrize("engine", list(OVER_HOSTS))
def test_over_two_hosts(engine: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """Who records the start reads no secret, and who says it again to the ports of the job changes nothing."""
    commands, connect = OVER_HOSTS[engine]
    script = tmp_path / "script.py"
    script.write_text(
        f"import functools, json, pathlib, sys, time\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"{textwrap.dedent(connect)}\n"
        "from engines.programs import train_with_a_token\n"
        "if __name__ == '__main__':\n"
        "    print('connected', flush=True)\n"
        f"    while not pathlib.Path({str(tmp_path)!r}, 'begin').exists(): time.sleep(0.05)\n"
        f"    print(json.dumps(run(functools.partial(train_with_a_token, {str(tmp_path)!r}))))\n"
    )
    variables = {
        "RAY_TMPDIR": str(hosts.folder),  # a short path, for its sockets
        "PYSPARK_PYTHON": sys.executable,
    }
    if engine == "pods":
        stand_in_for_kubectl(hosts, tmp_path)
        variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    log = tmp_path / "log"
    started = []
    try:
        for where, what in commands:
            with log.open("ab") as file:
                command = [
                    str(hosts.folder / "launcher"),
                    f"ring-{where}",
                    f"exec {shlex.join([program(engine), *what])}",
                ]
                environment = {**os.environ, **variables}
                started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
            if engine == "ray":  # the others wait for their head
                until(lambda: "Ray runtime started" in log.read_text(), 240)
        sent = hosts.bytes_sent(1)
        with recorded([f"{hosts.prefix}-b"]) as wire:
            driver = hosts.start([sys.executable, str(script)], {**variables, "HF_TOKEN": TOKEN})
            started.append(driver)
            assert driver.stdout is not None
            said = ""
            while "connected\n" not in said:
                line = driver.stdout.readline()
                assert line, said
                said += line
            of_the_engine = listening(hosts, "a", [driver.pid])
            (tmp_path / "begin").touch()
            until(lambda: all((tmp_path / f"trained {rank}").exists() for rank in (0, 1)), 400)
        ranks = ranks_on(hosts)
        ours = {host: listening(hosts, host, [driver.pid, *ranks]) - of_the_engine for host in "ab"}
        assert listening(hosts, "a", [driver.pid]) & ours["a"], "the relay of the places"
        assert listening(hosts, "b", ranks) & ours["b"], "the connections of a rank"
        answers = [
            wire.replayed(f"{hosts.prefix}-{host}", f"{hosts.prefix}-b", ports=ports) for host, ports in ours.items()
        ]
        (tmp_path / "go on").touch()
        said += driver.communicate(timeout=200)[0]
        assert driver.returncode == 0, said
        found = json.loads(next(line for line in said.splitlines()[::-1] if line.startswith("[[")))
        assert [one[:2] for one in found] == [[0, 2], [1, 2]]
        assert found[0][3] == found[1][3]
        assert hosts.bytes_sent(1) > sent
        secrets = [TOKEN, *{secret for one in found for secret in one[4:]}]
        assert len(secrets) == 3
        for secret in secrets:
            assert not wire.holding(secret.encode()), "a part of the environment can be read"
            assert not wire.holding(secret.encode().hex().encode())
            assert not [answer for answer in answers if secret.encode() in answer.heard]
        if engine == "pods":  # what the API server would carry goes from process to process here
            assert wire.holding(b"\x16\x03"), "handshakes of TLS, which show that this records"
        else:
            assert wire.holding(b"BEGIN CERTIFICATE"), "the engine has carried it, which shows that this records"
        assert sum(answer.connections for answer in answers) >= len(wire.flows)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        until(lambda: not any(engine in text for text in hosts.processes()))
        assert pids_in(f"{hosts.prefix}-b")
