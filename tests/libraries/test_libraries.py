"""Libraries over torch.distributed, as their documentation shows them: in a cell, again, after a failure, in a script.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import ran, ringrun
from libraries.programs import ACCELERATE, HUGGING_FACE, LIBRARIES
from ring_notebook.notebook.cluster.cluster import Cluster

LIMIT = 300
"""Seconds for a script, on a busy machine: to import Lightning alone takes seconds."""
pytest.importorskip("accelerate", reason="lives in an environment of its own: make test-libraries")
pytest.importorskip("lightning", reason="lives in an environment of its own: make test-libraries")
pytest.importorskip("transformers", reason="lives in an environment of its own: make test-libraries")
STARTS = [(name, ["ring_notebook.launch.cli", "--no-prefix", "-np", "2", sys.executable]) for name in LIBRARIES]
STARTS.append(("checkpoint", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]))
FAILS = "import os\n    if int(os.environ['RANK']) == 1: raise ValueError('boom')"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CHECKPOINT", str(tmp_path_factory.mktemp("checkpoint")))
        with Cluster(n=2) as started:
            yield started


@pytest.mark.parametrize("name", LIBRARIES)
def test_in_a_cell(cluster: Cluster, name: str) -> None:
    cell = LIBRARIES[name]
    works = cell.replace("FAIL", "pass")
    assert cluster.run(works).wait().status == "ok"
    assert cluster.run(works).wait().status == "ok"
    indent = next(line for line in cell.splitlines() if "FAIL" in line).split("FAIL")[0]
    with pytest.raises(ValueError, match="boom"):
        cluster.run(cell.replace("FAIL", FAILS.replace("    if", f"{indent}if"))).wait()
    if any(one.death for one in cluster.status()):  # of a rank that waited in Gloo
        cluster.heal()
    assert cluster.run(works).wait().status == "ok"


@pytest.mark.parametrize(("name", "starter"), STARTS, ids=lambda value: value if isinstance(value, str) else value[0])
def test_in_a_script(name: str, starter: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIBRARIES[name].replace("FAIL", "pass"))
    command = [sys.executable, "-m", *starter, str(script)]
    env = os.environ | {"CHECKPOINT": str(tmp_path / "saved")}
    done = ran(command, timeout=LIMIT, env=env)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("name", ["accelerate", "fabric", "trainer", "hugging_face"])
def test_in_a_batch_script(name: str, tmp_path: Path) -> None:
    """Slurm's batch script is task 0 of as many as the job has, and that is not what its ranks are."""
    script = tmp_path / "train.py"
    script.write_text(LIBRARIES[name].replace("FAIL", "pass"))
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    hosts = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    done = ringrun(sys.executable, script, timeout=LIMIT, env=os.environ | batch | task | hosts)
    assert done.returncode == 0, done.stderr[-5000:]


def test_accelerate_on_our_backend(cluster: Cluster) -> None:
    """Where there is a default group, accelerate takes that."""
    works = ACCELERATE.replace("FAIL", "pass").replace("accelerator = ", "ring.process_group()\naccelerator = ")
    for _ in range(2):
        cluster.run(works + "assert torch.distributed.get_backend() == 'ring'\n").wait()


def test_hugging_face_on_fewer_ranks(cluster: Cluster) -> None:
    """What accelerate below it keeps for the life of a process is that of this run."""
    trains = HUGGING_FACE.split("assert trainer.state")[0].replace("FAIL", "pass")
    cluster.run(trains).wait()
    cluster.run(trains.replace("world_size == 2", "world_size == 1"), n=1).wait()
