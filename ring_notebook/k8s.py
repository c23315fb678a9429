"""Ranks in pods that run: ``%ring start --on k8s://app=train``, ``ring_notebook.k8s.run(fn, "app=train")``.

`kubectl`, which has to reach the cluster, runs a process in each pod; it connects back to this one, which therefore is
best a pod itself. Pods that are the ranks of a job of their own need none of this: see docs/kubernetes.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.launch.lent_places import LentPlaces
from ring_notebook.launch.remote.network import address_towards
from ring_notebook.launch.remote.relay import Where
from ring_notebook.words import plural

__all__ = ["run"]

_SECONDS_TO_LIST = 30.0
_RUNNING = ("--field-selector", "status.phase=Running", "--output", "json")
# The secret comes over standard input: a command line is seen by others.
_SERVE = "import json; from ring_notebook.launch.remote.relay import serve; serve(*json.loads(input()))"


def run(
    fn: Callable[..., Any],
    selector: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    min_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks 0..num_proc-1, one in each running pod of ``selector``, results by rank.

    ``selector`` is a label's, such as ``app=train``, after ``NAMESPACE/`` where that is not the default one. ``env``,
    ``min_np`` and what is raised are those of `ring_notebook.run`; RingError when there are too few pods.
    """
    places = PodPlaces(selector)
    with LentPlaces(places, num_proc or places.most) as lent:
        return lent.run(fn, args, kwargs, env, min_np)


def places_at(selector: str) -> PodPlaces:
    """Those in the pods of ``NAMESPACE/SELECTOR``."""
    return PodPlaces(selector)


class PodPlaces:
    """An `Engine`: a process in each running pod of a selector, in the order of their names."""

    name = "Kubernetes"
    threads = 0  # by the pod's own limit

    def __init__(self, selector: str) -> None:
        if not shutil.which("kubectl"):
            raise RingError("kubectl is not installed here, or not on the PATH")
        namespace, slash, labels = selector.partition("/")
        self._flags = ["--namespace", namespace] if slash else []
        found = subprocess.run(
            ["kubectl", "get", "pods", *self._flags, "--selector", labels if slash else selector, *_RUNNING],
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_LIST,
            check=False,
        )
        if found.returncode:
            raise RingError(f"kubectl failed: {found.stderr.strip()}")
        pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in json.loads(found.stdout)["items"]}
        if not pods:
            raise RingError(f"no pod runs that matches {selector}; `kubectl get pods --show-labels` lists all")
        self._pods = sorted(pods)
        self.most = len(pods)
        self.address = address_towards(pods[self._pods[0]])
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def begin(self, size: int, where: Where) -> None:
        if size > self.most:
            raise RingError(f"expected {plural(size, 'pod')}, one for each rank, got {self.most}")
        for pod in self._pods[:size]:
            process = subprocess.Popen(
                ["kubectl", "exec", "--stdin", *self._flags, pod, "--", "python3", "-c", _SERVE],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._processes[pod] = process
            assert process.stdin is not None
            process.stdin.write(f"{json.dumps(where)}\n")
            process.stdin.flush()

    def trouble(self) -> str:
        for pod, process in self._processes.items():
            if process.poll() is not None:
                assert process.stderr is not None
                return f"the process in pod {pod} has ended: {process.stderr.read().strip().splitlines()[-1:]}"
        return ""

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()
        self._processes = {}
