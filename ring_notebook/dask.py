"""Ranks on the workers of a Dask cluster: ``ring_notebook.dask.run(client, fn)``.

Each rank is a process beside a worker of its own, and occupies one of the worker's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from distributed import Client

from ring_notebook.errors import RingError
from ring_notebook.launch.lent_places import run_there
from ring_notebook.launch.remote.network import address_towards
from ring_notebook.launch.remote.relay import Relay, introduce, serve
from ring_notebook.text.words import plural

__all__ = ["run"]


def run(
    client: Client,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    min_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks 0..num_proc-1, one for each worker of ``client``, results by rank.

    ``num_proc`` is by default the number of workers; with dask-cuda that is one for each GPU. A rank computes with as
    many threads as its worker has. ``env``, ``min_np`` and errors are as in `ring_notebook.run`; RingError when there
    are too few workers.
    """
    return run_there(DaskPlaces(client), fn, args, kwargs, num_proc, env, min_np)


def places_at(address: str) -> DaskPlaces:
    """The places of the cluster whose scheduler is at ``HOST:PORT``."""
    return DaskPlaces(Client(f"tcp://{address}"), owns=True)


class DaskPlaces:
    """An `Engine`: a task on each of the first workers of ``client``, which it closes if it ``owns`` it."""

    name = "Dask"

    def __init__(self, client: Client, owns: bool = False) -> None:
        self._client = client
        self._owns = owns
        self._workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
        self.most = max(1, len(self._workers))
        """The number of workers."""
        self.threads = min((worker["nthreads"] for worker in self._workers.values()), default=0)
        self.address = address_towards(urlsplit(client.scheduler.address).hostname or "127.0.0.1")
        self._calls: list[Any] = []

    def begin(self, size: int, relay: Relay) -> None:
        if size > len(self._workers):
            raise RingError(
                f"expected {plural(size, 'worker')}, one for each rank, got {len(self._workers)}; "
                "start more workers, or fewer ranks"
            )
        self._calls = [self._submit(number, introduce) for number in range(size)]
        for number, call in enumerate(self._calls):
            call.add_done_callback(partial(self._serve, number, relay))

    def _submit(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        # Elsewhere, or again, it would be the place of another rank.
        options = {"workers": [list(self._workers)[number]], "allow_other_workers": False, "retries": 0, "pure": False}
        return self._client.submit(function, *arguments, **options)

    def _serve(self, number: int, relay: Relay, introduced: Any) -> None:
        if introduced.status == "finished" and self._calls:
            relay.admit(introduced.result())
            self._calls[number] = self._submit(number, serve, *relay.where)

    def trouble(self) -> str:
        for call in self._calls:
            if call.status in ("error", "cancelled", "lost"):
                return f"a task was {call.status}: {call.exception(timeout=1)}"
        lost = set(list(self._workers)[: len(self._calls)]) - set(self._client.scheduler_info(n_workers=-1)["workers"])
        return f"{plural(len(lost), 'worker')} has ended: {', '.join(sorted(lost))}" if lost else ""

    def end(self) -> None:
        for call in self._calls:
            call.cancel(force=True)
        self._calls = []
        if self._owns:
            self._client.close()
