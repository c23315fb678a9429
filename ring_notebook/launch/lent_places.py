"""Ranks in places that an engine such as Ray, Dask or Spark lends: `run` there, and hosts for a cluster."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

from ring_notebook.files.claimed_folders import claimed_folder
from ring_notebook.launch.remote.relay import Relay, wait_for_places
from ring_notebook.launch.run_function import elastic_of, run_on_ranks
from ring_notebook.rank.rank_threads import OMP


class Lender(NamedTuple):
    """An engine that lends places, by the module of this package that has its name."""

    address: str
    """As a user types it."""
    package: str
    """The package that its module needs, an extra of ours; empty without one."""


LENDERS = {
    "ray": Lender("ray://HOST:PORT", "ray"),
    "dask": Lender("dask://HOST:PORT", "distributed"),
    "spark": Lender("spark", "pyspark"),
    "k8s": Lender("k8s://SELECTOR", ""),
}
*_FIRST, _LAST = (one.address for one in LENDERS.values())
ADDRESSES = f"{', '.join(_FIRST)} or {_LAST}"
_SECONDS_TO_COME = 300.0  # for places: an engine may start machines for them


class Engine(Protocol):
    """An engine that lends places."""

    name: str
    """As users know it."""
    address: str
    """The address at which the places reach this host."""
    most: int
    """The number of places that it has room for."""
    threads: int
    """The compute threads of the rank in a place; 0 if the engine does not say."""

    def begin(self, size: int, relay: Relay) -> None:
        """Begin to call ``serve(*relay.where)`` in ``size`` processes at once, and do not wait.

        First passes to ``relay.admit`` what ``introduce()`` returns in each. Raises RingError if there are too few.
        """

    def trouble(self) -> str:
        """Why a place ended before it was given back, or will not come; empty while all is well."""

    def end(self) -> None:
        """Give the places back; `serve` there has returned, or must end."""


class GrowingEngine(Engine, Protocol):
    """One that may lend more places later."""

    def offer(self, count: int, relay: Relay) -> None:
        """Like `begin`, in up to ``count`` more processes when there is room; replaces processes that end."""


class LentPlaces:
    """``size`` places of an engine, from `__enter__` to `__exit__`; job after job may run in them.

    With a greater ``most`` the engine lends up to so many when it has room; elastic jobs grow into them.
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
            relay = Relay(self._engine.address, stack.enter_context(claimed_folder("run")), self._why_one_has_ended)
            stack.callback(self._engine.end)
            stack.callback(relay.close)
            self._engine.begin(self._size, relay)
            if self._most > self._size:
                cast(GrowingEngine, self._engine).offer(self._most - self._size, relay)
                self._script = relay.discovery
            grows = bool(self._script)
            found = wait_for_places(relay, self._size, _SECONDS_TO_COME, self._engine.trouble, self._engine.name, grows)
            self.hosts = ",".join(map(str, found))
            threads = {OMP: str(self._engine.threads)} if self._engine.threads else {}
            self.environment = {"RING_REMOTE_SHELL": relay.shell, **threads}
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, traceback)

    def _why_one_has_ended(self) -> str:
        trouble = self._engine.trouble()
        return f"{self._engine.name}: {trouble}" if trouble else ""

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

        A job that may grow begins with all ``size`` places; ``min_np`` is then the same number by default. ``take`` is
        called with what ranks report.
        """
        given = {**self.environment, **(env or {})}
        elastic = elastic_of(self._size if min_np is None and self._script else min_np, self._most or None)
        if self._script:
            elastic = replace(elastic, script=self._script)
        return run_on_ranks(fn, args, kwargs or {}, self._size, self.hosts, None, given, (), elastic, take=take)


def run_there(
    engine: Engine,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_proc: int | None,
    env: Mapping[str, str] | None,
    min_np: int | None,
    max_np: int | None = None,
) -> list[Any]:
    """`LentPlaces.run` in ``num_proc`` places of ``engine``, by default in all, which are then given back."""
    with LentPlaces(engine, num_proc or engine.most, max_np or 0) as lent:
        return lent.run(fn, args, kwargs, env, min_np)


def engine_at(address: str) -> Engine:
    """The engine at an address of LENDERS; what follows the scheme is its own.

    Raises ValueError for another scheme, and ModuleNotFoundError where the package of the engine is not installed.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in LENDERS:
        raise ValueError(f"cannot read {address!r}; expected {ADDRESSES}")
    try:
        engine: Engine = importlib.import_module(f"ring_notebook.{scheme}").places_at(rest)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != LENDERS[scheme].package:
            raise
        raise ModuleNotFoundError(
            f"{scheme} is not installed here: `pip install 'ring-notebook[{scheme}]'`", name=error.name
        ) from None
    return engine
