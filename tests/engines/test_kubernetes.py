"""The manifests of docs/kubernetes: valid, and their command and variables make ranks of processes on two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.two_hosts import ADDRESSES, NAMES, TwoHosts, hosts_or_skip

schemas = pytest.importorskip("kubernetes_validate", reason="lives in an environment of its own: make test-engines")
yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
VERSION = "1.30"
TRAIN = """
from ring_notebook.api.basics import cross_size, init, rank, size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.core.communicator import ReduceOp
init()
print(f"{rank()} of {size()} on {cross_size()} hosts: {allreduce_numbers([rank() + 1], ReduceOp.SUM, 'numbers')}")
"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in a document."""
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from templates(value)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml", "pytorchjob.yaml"])
def test_a_manifest_is_valid(name: str) -> None:
    """Schemas of Kubernetes' own kinds; of what operators define, the jobs and pods within."""
    found = documents(name)
    for document in found:
        if "." not in document["apiVersion"].partition("/")[0]:
            schemas.validate(document, VERSION, strict=True)
    pods = [template for document in found for template in templates(document)]
    assert pods
    for pod in pods:
        schemas.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod["spec"]}, VERSION, strict=True
        )


def test_an_invalid_manifest_is_noticed() -> None:
    job = documents("indexed-job.yaml")[1]
    job["spec"]["completion"] = 4
    with pytest.raises(schemas.ValidationError):
        schemas.validate(job, VERSION, strict=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip()


def test_the_pods_of_the_indexed_job_find_each_other(hosts: TwoHosts, tmp_path: Path) -> None:
    """Two pods on each host; the last ones come first."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (container,) = next(templates(documents("indexed-job.yaml")[1]))["spec"]["containers"]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    assert container["command"] == ["python", "/train.py"]
    variables["RING_RENDEZVOUS"] = variables["RING_RENDEZVOUS"].replace("train-0.train", ADDRESSES[0])
    variables["RING_RENDEZVOUS_SECRET"] = os.urandom(16).hex()
    pods = [
        subprocess.Popen(
            [str(hosts.folder / "launcher"), NAMES[index // 2], f"exec {sys.executable} {script}"],
            env={**os.environ, **variables, "RING_RANK": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in reversed(range(4))
    ]
    try:
        said = [pod.communicate(timeout=120)[0].strip() for pod in reversed(pods)]
    finally:
        for pod in pods:
            pod.kill()
    assert said == [f"{rank} of 4 on 2 hosts: [10]" for rank in range(4)]
