"""Ranks on a Ray cluster: ``ring_notebook.ray.run(fn, num_proc=4)`` (Horovod: ``horovod.ray``).

Each rank is a process beside an actor, which holds its CPUs and GPUs. All nodes need ring_notebook at the same path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ring_notebook.api import basics
from ring_notebook.launch.lent_places import LentPlaces, run_there
from ring_notebook.launch.remote.relay import Relay, introduce, serve
from ring_notebook.rank.function_rank import report

__all__ = ["ElasticRayExecutor", "RayExecutor", "ray_logger", "run"]

_SECONDS_TO_RETURN = 0.5  # between two attempts to reach an actor whose node has died
Callbacks: TypeAlias = "Sequence[Callable[[Any], object]] | None"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    cpus_per_worker: int = 1,
    gpus_per_worker: int | None = None,
    env: Mapping[str, str] | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks 0..num_proc-1 of a Ray cluster, results by rank.

    ``num_proc`` is by default the number of the cluster's GPUs, else of its CPUs. A rank has ``gpus_per_worker`` GPUs
    (by default one where the cluster has any) and ``cpus_per_worker`` CPUs, with as many threads. ``env``, ``min_np``
    and errors are as in `ring_notebook.run`; RingError when Ray has no room for the ranks. With ``max_np`` an elastic
    job grows to so many ranks when Ray gets room, and replaces ranks that have ended.
    """
    places = RayPlaces(cpus_per_worker, gpus_per_worker)
    return run_there(places, fn, args, kwargs, num_proc, env, min_np, max_np)


class RayExecutor:
    """Places on a Ray cluster that are kept from `start` to `shutdown` (Horovod: ``horovod.ray.RayExecutor``).

    Each `run` starts its ranks anew in them; Horovod's keep an object of ``executable_cls`` between runs. There are
    ``num_workers`` ranks, or ``num_hosts`` times ``num_workers_per_host``: Ray chooses their nodes. ``settings`` and
    ``use_current_placement_group`` are Horovod's arguments and have no effect.

        executor = RayExecutor(num_workers=4, use_gpu=True)
        executor.start()
        losses = executor.run(train, kwargs={"epochs": 3})
        executor.shutdown()
    """

    @staticmethod
    def create_settings(timeout_s: int = 30, **settings: object) -> dict[str, object]:
        """Horovod's settings, for the first argument; without effect, as places have no ssh and no such timeout."""
        return {"timeout_s": timeout_s, **settings}

    def __init__(
        self,
        settings: object = None,
        num_workers: int | None = None,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        use_current_placement_group: bool = True,
    ) -> None:
        if num_workers and num_hosts:
            raise ValueError(
                f"expected num_workers, or num_hosts and num_workers_per_host, got both: {num_workers} and {num_hosts}"
            )
        self._places = RayPlaces(cpus_per_worker, gpus_per_worker or 1 if use_gpu else 0)
        self._lent = LentPlaces(
            self._places, num_workers or (num_hosts or 0) * num_workers_per_host or self._places.most
        )
        self._env = {**(env_vars or {})}

    def start(self, *, extra_env_vars: Mapping[str, str] | None = None) -> None:
        """Wait until Ray has lent the places. Raises RingError when it cannot."""
        self._env |= extra_env_vars or {}
        self._lent.__enter__()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Callbacks = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn`` on a rank in each place, results by rank.

        ``callbacks`` are called here with what ranks give to `ray_logger.log`; when one raises, so does this, at the
        end.
        """
        return self._lent.run(fn, args, kwargs, {**self._env, **(env or {})}, take=_all_of(callbacks))

    def shutdown(self) -> None:
        """Give the places back."""
        self._lent.__exit__(None, None, None)


class ElasticRayExecutor:
    """Elastic jobs on a Ray cluster that may grow and shrink (Horovod: ``horovod.ray.ElasticRayExecutor``).

    A job begins with the fewest ranks of the settings. Others join while Ray has room, up to the most; those whose
    actors or nodes die leave it. ``fn`` trains by `ring_notebook.torch.elastic.run`.

        settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=8)
        executor = ElasticRayExecutor(settings, use_gpu=True)
        executor.start()
        losses = executor.run(train)
    """

    class Settings(NamedTuple):
        """How many ranks a job has."""

        min_num_proc: int
        max_num_proc: int

    @classmethod
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        *,
        min_np: int | None = None,
        max_np: int | None = None,
        **_settings: object,
    ) -> Settings:
        """Settings of jobs with so many ranks; by default at most as many as the cluster has room for.

        Horovod's others (``timeout_s``, ``elastic_timeout``, ``reset_limit``, ``verbose``, ...) have no effect.
        """
        return cls.Settings(min_np or min_num_proc, max_np or max_num_proc or 0)

    def __init__(
        self,
        settings: Settings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        if settings.max_num_proc and settings.max_num_proc < settings.min_num_proc:
            raise ValueError(f"expected at least {settings.min_num_proc} for max_num_proc, got {settings.max_num_proc}")
        self._settings = settings
        self._resources = cpus_per_slot, (gpus_per_slot or 1) if use_gpu else 0
        self._env = env_vars
        self._places: RayPlaces | None = None

    def start(self) -> None:
        """Connect to the cluster."""
        self._places = RayPlaces(*self._resources)

    def run(self, worker_fn: Callable[..., Any], callbacks: Callbacks = None) -> list[Any]:
        """Call ``worker_fn`` on all ranks; the results of those that returned, by rank. See `RayExecutor.run`."""
        if self._places is None:
            raise RuntimeError("the executor has not been started; call start() first")
        fewest, most = self._settings
        with LentPlaces(self._places, fewest, most or max(fewest, self._places.most)) as lent:
            return lent.run(worker_fn, env=self._env, min_np=fewest, take=_all_of(callbacks))


class ray_logger:  # noqa: N801 - Horovod's name, a module there
    """What ranks tell the callbacks of an executor's `run` (Horovod: ``horovod.ray.ray_logger``)."""

    @staticmethod
    def log(info_dict: Mapping[str, Any], chief_only: bool = True) -> None:
        """Call the callbacks with ``info_dict``, from rank 0 only, or with ``chief_only=False`` from every rank."""
        if not chief_only or basics.rank() == 0:
            report(info_dict)


def _all_of(callbacks: Callbacks) -> Callable[[Any], None]:
    def take(value: Any) -> None:
        for callback in callbacks or ():
            callback(value)

    return take


def places_at(address: str) -> RayPlaces:
    """The places of the cluster at ``HOST:PORT``, or at RAY_ADDRESS if that is empty."""
    return RayPlaces(address=address or None)


class RayPlaces:
    """An `Engine`: an actor for each place, near one another. Connects to the cluster of RAY_ADDRESS, or starts one."""

    name = "Ray"

    def __init__(self, cpus: int = 1, gpus: int | None = None, address: str | None = None) -> None:
        if not ray.is_initialized():
            ray.init(address=address)
        found = ray.cluster_resources()
        self._needs = {"CPU": cpus, "GPU": bool(found.get("GPU")) if gpus is None else gpus}
        self.most = max(1, int(min(found.get(kind, 0) // count for kind, count in self._needs.items() if count)))
        """The number of places that the cluster is large enough for."""
        self.threads = cpus
        self.address = str(ray.util.get_node_ip_address())
        self._group: Any = None
        self._size = 0
        self._places: list[_Lent] = []

    def begin(self, size: int, relay: Relay) -> None:
        needs = {kind: count for kind, count in self._needs.items() if count}
        self._size = size
        self._group = placement_group([needs] * size, strategy="PACK")
        kind = self._kind()
        for bundle in range(size):
            where_to = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._places.append(_Lent(kind.options(scheduling_strategy=where_to).remote(), relay))

    def offer(self, count: int, relay: Relay) -> None:
        # Actors without room wait for it; an actor whose node has died begins again elsewhere.
        again = self._kind().options(max_restarts=-1)
        self._places += [_Lent(again.remote(), relay, again=True) for _ in range(count)]

    def _kind(self) -> Any:
        return ray.remote(num_cpus=self._needs["CPU"], num_gpus=self._needs["GPU"], max_restarts=0)(_Place)

    def trouble(self) -> str:
        for place in self._places[: self._size]:
            if place.problem:
                return place.problem
        needs = " and ".join(f"{count} {kind}" for kind, count in self._needs.items() if count)
        total = ray.cluster_resources()
        if self._size > self.most:
            has = " and ".join(f"{total.get(kind, 0):g} {kind}" for kind, count in self._needs.items() if count)
            return f"each needs {needs}, and the whole cluster has {has}"
        return ""

    def end(self) -> None:
        for place in self._places:
            place.end()
        if self._group is not None:
            remove_placement_group(self._group)
        self._places, self._group = [], None


class _Place:
    """The class of the actors."""

    def introduce(self) -> str:
        return introduce()

    def serve(self, *where: Any) -> None:
        serve(*where)


class _Lent(threading.Thread):
    """Makes an actor introduce itself to ``relay`` and serve it; ``again`` after each restart by Ray."""

    def __init__(self, actor: Any, relay: Relay, again: bool = False) -> None:
        super().__init__(name="ring-ray", daemon=True)
        self._actor = actor
        self._relay = relay
        self._again = again
        self._ended = threading.Event()
        self.problem = ""
        """Why the actor no longer serves."""
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                self._relay.admit(ray.get(self._actor.introduce.remote()))
                ray.get(self._actor.serve.remote(*self._relay.where))
                return
            except Exception as error:
                self.problem = str(error).strip().splitlines()[0]
            if not self._again:
                return
            self._ended.wait(_SECONDS_TO_RETURN)

    def end(self) -> None:
        """Give the place back."""
        self._ended.set()
        ray.kill(self._actor)
        self.join()
