"""Ranks in places that an engine such as Ray, Dask or Spark lends: `run` there, and hosts for a cluster."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, cast

from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.launch.remote.relay import Relay, Where, wait_for_places
from ring_notebook.launch.run_function import elastic_of, run_on_ranks
from ring_notebook.rank.rank_threads import OMP

ENGINES = {"ray": "ray", "dask": "distributed", "spark": "pyspark", "k8s": ""}
"""The engines by the scheme of their addresses, and the package that each needs."""
_SECONDS_TO_COME = 300.0  # for places: an engine may start machines for them


class Engine(Protocol):
    """What lends places."""

    name: str
    """As users know it."""
    address: str
    """Of this host, as the places reach it."""
    most: int
    """For how many places it has room."""
    threads: int
    """With how many threads the rank of a place computes; 0 where the engine does not say."""

    def begin(self, size: int, where: Where) -> None:
        """Begin to call ``serve(*where)`` in ``size`` processes at once. Raises RingError where there are too few."""

    def trouble(self) -> str:
        """Why a place has ended that was not given back, or will not come; empty while all is well."""

    def end(self) -> None:
        """Give the places back, where `serve` has returned, or is to end."""


class GrowingEngine(Engine, Protocol):
    """One that may lend more places later."""

    def offer(self, count: int, where: Where) -> None:
        """Call ``serve(*where)`` in up to ``count`` more processes, whenever there is room; again where one ends."""


class LentPlaces:
    """``size`` places of an engine, from `__enter__` to `__exit__`; job after job may run in them.

    With a greater ``most`` further ones come while the engine has room, up to so many; elastic jobs grow into them.
    """

    def __init__(self, engine: Engine, size: int, most: int = 0) -> None:
        self._engine = engine
        self._size = size
        self._most = most
        self._script = ""
        self.hosts = ""
        """Where they are, as ``a:2,b:2``."""
        self.environment: dict[str, str] = {}
        """The variables with which a supervisor reaches them."""
        self._held = contextlib.ExitStack()

    def __enter__(self) -> LentPlaces:
        with contextlib.ExitStack() as stack:
            relay = Relay(self._engine.address, stack.enter_context(claimed_folder("run")))
            stack.callback(self._engine.end)
            stack.callback(relay.close)
            self._engine.begin(self._size, relay.where)
            if self._most > self._size:
                cast(GrowingEngine, self._engine).offer(self._most - self._size, relay.where)
                self._script = relay.discovery
            grows = bool(self._script)
            found = wait_for_places(relay, self._size, _SECONDS_TO_COME, self._engine.trouble, self._engine.name, grows)
            self.hosts = ",".join(f"{host.name}:{host.slots}" for host in found)
            threads = {OMP: str(self._engine.threads)} if self._engine.threads else {}
            self.environment = {"RING_REMOTE_SHELL": relay.shell, **threads}
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, traceback)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        min_np: int | None = None,
        take: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Call ``fn`` on a rank in each place, a fresh process; see `ring_notebook.run`.

        A job that may grow begins with the ``size`` of the places, and is elastic from ``min_np`` ranks, or as many.
        ``take`` is called with what ranks report.
        """
        given = {**self.environment, **(env or {})}
        elastic = elastic_of(self._size if min_np is None and self._script else min_np, self._most or None)
        if self._script:
            elastic = replace(elastic, script=self._script)
        return run_on_ranks(fn, args, kwargs or {}, self._size, self.hosts, None, given, (), elastic, take=take)


def engine_at(address: str) -> Engine:
    """The engine at ``ray://...``, ``dask://...``, ``spark`` or ``k8s://...``; what follows the scheme is its own.

    Raises ValueError for another scheme, and ModuleNotFoundError where the package of the engine is not installed.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in ENGINES:
        raise ValueError(f"cannot read {address!r}; expected ray://ADDRESS, dask://ADDRESS, spark or k8s://SELECTOR")
    try:
        engine: Engine = importlib.import_module(f"ring_notebook.{scheme}").places_at(rest)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != ENGINES[scheme]:
            raise
        raise ModuleNotFoundError(
            f"{scheme} is not installed here: `pip install 'ring-notebook[{scheme}]'`", name=error.name
        ) from None
    return engine
