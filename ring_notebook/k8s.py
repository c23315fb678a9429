"""Ranks in pods that run: ``%ring start --on k8s://app=train``, ``ring_notebook.k8s.run(fn, "app=train")``.

`kubectl`, which has to reach the cluster, runs a process in each pod; it connects back to this process, which therefore
is best in a pod too. Pods that are the ranks of a job of their own need none of this: see docs/kubernetes/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.launch.lent_places import run_there
from ring_notebook.launch.remote.network import address_towards
from ring_notebook.launch.remote.relay import Relay
from ring_notebook.text.words import plural

__all__ = ["run"]

_CAPACITY = 1 << 16
_SECONDS_TO_LIST = 30.0
_RUNNING = ("--field-selector", "status.phase=Running", "--output", "json")
# It introduces itself before it learns where the relay is.
_SERVE = """
import json
from ring_notebook.launch.remote.relay import introduce, serve
print(json.dumps(introduce()), flush=True)
serve(*json.loads(input()))
"""


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
    ``min_np`` and errors are as in `ring_notebook.run`; RingError when there are too few pods.
    """
    return run_there(PodPlaces(selector), fn, args, kwargs, num_proc, env, min_np)


def places_at(selector: str) -> PodPlaces:
    """The places in the pods of ``NAMESPACE/SELECTOR``."""
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
        self._reading = threading.Lock()
        self._words: dict[str, bytes] = {}  # of processes that have ended

    def begin(self, size: int, relay: Relay) -> None:
        if size > self.most:
            raise RingError(f"expected {plural(size, 'pod')}, one for each rank, got {self.most}")
        for pod in self._pods[:size]:
            process = subprocess.Popen(
                ["kubectl", "exec", "--stdin", *self._flags, pod, "--", "python3", "-c", _SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._processes[pod] = process
            threading.Thread(target=_introduce, args=(process, relay), name="ring-pod", daemon=True).start()

    def trouble(self) -> str:
        for pod, process in self._processes.items():
            if process.poll() is not None:
                assert process.stderr is not None
                with self._reading, suppress(BlockingIOError, ValueError):  # what it has started may still have it
                    os.set_blocking(process.stderr.fileno(), False)
                    self._words[pod] = self._words.get(pod, b"") + os.read(process.stderr.fileno(), _CAPACITY)
                last = self._words.get(pod, b"").decode(errors="replace").strip().rpartition("\n")[2]
                return ": ".join(filter(None, [f"the process in pod {pod} has ended", last]))
        return ""

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()
        self._processes = {}


def _introduce(process: subprocess.Popen[str], relay: Relay) -> None:
    """Admit the place in ``process`` to ``relay``, and tell the place where the relay is."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # it has ended
        relay.admit(json.loads(process.stdout.readline()))
        process.stdin.write(f"{json.dumps(relay.where)}\n")
        process.stdin.flush()
