"""`Cluster`: the engines that a notebook's cells run on, started, attached to, used and stopped."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ring_notebook.analysis.time_limits import REGISTERING
from ring_notebook.config import config
from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.files.snapshot_files import Snapshot
from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here, parse_hosts, slots_by_name
from ring_notebook.launch.launchers.own_launchers import too_many_ranks
from ring_notebook.launch.lent_places import LentPlaces, engine_at
from ring_notebook.launch.own_batch_job import job_name, walltime
from ring_notebook.notebook.cluster import cluster_folders, snapshots
from ring_notebook.notebook.cluster.death import Death
from ring_notebook.notebook.cluster.death_watch import LostRanks
from ring_notebook.notebook.cluster.default_size import choose_size
from ring_notebook.notebook.cluster.engine_forks import EngineForks, take_forks
from ring_notebook.notebook.cluster.engine_status import EngineStatus, engine_statuses
from ring_notebook.notebook.cluster.heal import NOT_HERE, end, heal, meet, prepare_engines, remove
from ring_notebook.notebook.cluster.processes import Processes, require_descriptors, require_processes
from ring_notebook.notebook.cluster.readiness import UnfinishedRuns, check_ranks, require_living
from ring_notebook.notebook.cluster.stacks import Stack, stacks
from ring_notebook.notebook.cluster.synced_folder import Synced, SyncedFolder
from ring_notebook.notebook.deferred_interrupt import DeferredInterrupt
from ring_notebook.notebook.engines import Engine, Engines
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.send_cell import send
from ring_notebook.notebook.run.takeover import logs_in_progress
from ring_notebook.protocol.registration import port_warning
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.protocol.sent_functions import dumps
from ring_notebook.rank.named_interrupt import DEBUGGER
from ring_notebook.text.words import plural

_SECONDS_TO_END = 10.0  # for a run after one of its ranks was ended
_ATTACH_TIMEOUT = 10.0
_SECONDS_TO_NAME = 2.0  # the user has pressed Tab and waits
_NAMESPACE = "ring_notebook.engine.namespace"  # on the ranks


class Cluster:
    """``n`` engines, one per rank, and their controller. As a context manager it starts and stops.

    ``hosts`` (``"a:4,b:4"``) is by default the allocation of a batch system, else this machine; ``n`` is by default the
    number of slots, else of GPUs, else of cores, at least 2. The cluster ends with this kernel; with
    ``keep`` it stays, and `attach` finds it. ``on`` is an engine that lends places for the ranks, such as
    ``"ray://10.0.0.1:6379"``; see `engine_at`. This kernel relays their messages, so it cannot ``keep``
    them.

        with Cluster(4) as cluster:
            run = cluster.run("print(ring.rank())").wait()
    """

    def __init__(self, n: int | None = None, hosts: str = "", *, keep: bool = False, on: str = "") -> None:
        if n is not None and n < 1:
            raise ValueError(f"a cluster needs at least one engine, got n={n}")
        if on and (hosts or keep):
            raise ClusterError(
                f"on={on} and {'hosts' if hosts else 'keep'} exclude each other: the engine chooses the hosts, and "
                "lends them to this kernel alone"
            )
        self._on = on
        self._lent: LentPlaces | None = None
        self._forks: EngineForks | None = None
        self._n = n or 0
        self._hosts: tuple[Host, ...] = ()
        self._why = ""
        try:
            self._named = parse_hosts(hosts)
            if not on:
                self._choose_size(n)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        self._keep = keep
        self._kernel = os.getpid()
        self.foreign = False
        """Whether another notebook, which still runs, has started it."""
        self.runs = UnfinishedRuns()
        """The runs that ranks still execute."""
        self.seconds_to_start = 0.0
        self.warning = ""
        """What the user should know of a cluster that has started; empty for nothing."""
        self._processes: Processes | None = None
        self._engines: Engines | None = None
        self.directory = Path()  # of its files; its name identifies the cluster in its runs
        self._synced_folder = SyncedFolder(Path.cwd())
        self._met = True  # all living engines use the same ring memory
        self._formation = 0  # number of the current one

    @property
    def living(self) -> list[int]:
        """The ranks that have not died. Raises ClusterError when the cluster does not run."""
        return self._connected().living()

    @property
    def last_run(self) -> Run | None:
        """The newest run."""
        return self.runs.last

    @property
    def n(self) -> int:
        """The number of engines; `grow`, `shrink` and `restart` change it."""
        return self._n

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the engines and their slots; empty for this host alone."""
        return self._hosts

    @property
    def why(self) -> str:
        """Why there are ``n`` engines, in words."""
        return self._why

    @property
    def threads(self) -> list[int]:
        """The number of threads of each rank, by rank, unless a cell has set another."""
        return [engine.threads for engine in self._connected().all]

    def _choose_size(self, n: int | None) -> None:
        size = choose_size(n, self._named)
        self._n, self._hosts, self._why = size.n, size.hosts, size.why

    def start(self) -> Cluster:
        """Start controller and engines; returns this cluster when it can run a cell.

        Raises ClusterError, MPIMissingError or CoreMissingError, each with what to do.
        """
        if self.running:
            raise ClusterError(f"the cluster of {self.n} engines is already running; `%ring stop` ends it")
        started = time.monotonic()
        if self._on:
            self._borrow(self._on)
        require_processes(self.n, self._hosts)
        require_descriptors(self.n)
        self.foreign = False
        self.directory = cluster_folders.new_directory(self._keep)
        atexit.register(self._leave_or_stop)
        try:
            forks = self._fork_from()
            lent = self._lent.environment if self._lent else {}
            self._processes = Processes.launch(self.directory, self.n, self._hosts, self._keep, lent, forks)
            limit = config().start_limit(REGISTERING)
            client = self._processes.connect(limit)
            self._engines = self._engines_of(client, self._processes, self._processes.trouble_at_start)
            self._engines.wait_for(range(self.n), limit)
            self._prepare(self._engines, self._processes)
            self._engines.trouble = self._processes.trouble
            self._begin_sync(self._engines)
        except BaseException as error:
            message = self._processes.not_started(str(error)) if self._processes else str(error)
            with DeferredInterrupt():  # a second interrupt would leave processes behind
                self.stop()
            if isinstance(error, ClusterError):
                raise ClusterError(message) from None
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(
                    f"interrupted {time.monotonic() - started:.1f} s after the start of {plural(self.n, 'engine')}, "
                    "which have been ended: no cluster runs. Execute the cell again to start one"
                ) from None
            raise
        self.seconds_to_start = time.monotonic() - started
        self.warning = port_warning(self._processes.log("controller"))
        return self

    def _fork_from(self) -> EngineForks | None:
        """The process that forks the engines; None if the supervisor starts them without it."""
        if self._forks is not None and not self._forks.usable():
            self._end_forks()
        if self._forks is None:  # it ends with this kernel
            self._forks = take_forks(here=not (self._keep or self._on) and only_here(self._hosts))
        return self._forks

    def _end_forks(self) -> None:
        forks, self._forks = self._forks, None
        if forks is not None:
            forks.close()

    def _borrow(self, engine: str) -> None:
        """Borrow a place for each rank. Raises ClusterError if there are too few."""
        try:
            places = engine_at(engine)
            self._lent = LentPlaces(places, self._n or places.most).__enter__()
        except (RingError, ValueError, ModuleNotFoundError) as error:
            raise ClusterError(str(error)) from None
        self._hosts = tuple(parse_hosts(self._lent.hosts))
        self._n, self._why = sum(host.slots for host in self._hosts), f"places of {places.name}"

    @classmethod
    def attach(cls, which: str = "") -> Cluster:
        """The running cluster that another kernel has started from this folder: that of this notebook, or a kept one.

        ``which``, a notebook's name or the beginning of an id, selects any cluster, also one whose notebook is open.
        `runs` are its runs in progress. Raises ClusterError when there is no such cluster, when several could be meant
        (with a list), and when another user could change its files.
        """
        cluster_folders.check_folder()
        for directory in cluster_folders.to_attach_to(which):
            about = cluster_folders.read(directory)
            if not about:  # removed meanwhile by the kernel that has ended it
                continue
            cluster = cls(about["n"], about.get("hosts", ""), keep=about["keep"])
            cluster._why = about["why"]
            cluster.foreign = cluster_folders.has_kernel(about) and about["kernel"] != os.getpid()
            cluster.directory = directory
            atexit.register(cluster._leave_or_stop)
            try:
                cluster._processes = Processes.attach(directory, about["controller"], about["launcher"])
                client = cluster._processes.connect(_ATTACH_TIMEOUT)
                cluster._engines = cluster._engines_of(client, cluster._processes, cluster._processes.trouble)
                cluster._engines.all = [Engine(**engine) for engine in about["engines"]]
                if cluster._processes.lost is not None:
                    cluster._processes.lost.watch(cluster._engines.all)
                cluster._met, cluster._formation = about["met"], about["formation"]
                cluster._engines.wait_for(cluster.living, _ATTACH_TIMEOUT)
                cluster._follow_runs(cluster._engines)
                if not cluster.foreign:  # it is this kernel's from now on
                    cluster._describe(cluster._engines, cluster._processes)
                return cluster
            except BaseException as error:
                cluster._end(leave=True)
                if not isinstance(error, ClusterError):  # another cluster may answer
                    raise
        raise ClusterError(
            "no cluster of this folder is running; `%ring start --keep` starts one that outlives its notebook"
        )

    def stop(self) -> None:
        """End all engines and the controller; returns when they have ended. Does nothing when none runs.

        A cluster of another notebook that still runs is left, not stopped.
        """
        self._end(leave=self.foreign)
        self._end_forks()

    def _leave_or_stop(self) -> None:
        """Leave or stop the cluster when this kernel exits; does nothing in its forks."""
        if os.getpid() != self._kernel:
            return
        self._end(leave=self.foreign or self._keep)
        self._end_forks()

    def _end(self, leave: bool) -> None:
        atexit.unregister(self._leave_or_stop)
        if leave:
            self.runs.leave()  # first: a run would take closed engines for dead ones
        if self._engines is not None:
            self._engines.close()
            self._engines = None
        if self._processes is not None:
            if leave:
                self._processes.leave()
            else:
                self._processes.stop()
            self._processes = None
        if self._lent is not None:
            self._lent.__exit__(None, None, None)
            self._lent = None
        self.runs = UnfinishedRuns()
        if self.directory.name and not leave:
            cluster_folders.remove(self.directory)

    def restart(self, n: int | None = None) -> Cluster:
        """Stop the cluster and start it again with ``n`` engines, by default as many. All variables are lost.

        Raises ClusterError as `start`; if this user may not have so many processes, the old cluster stays.
        """
        try:
            size = choose_size(n, self._named) if n and not self._on else None
        except ValueError as error:
            raise ClusterError(str(error)) from None
        require_processes(n or self._n, size.hosts if size else self._hosts)  # before the old cluster ends
        require_descriptors(n or self._n)
        self._end(leave=self.foreign)
        if size is not None:
            self._n, self._hosts, self._why = size.n, size.hosts, size.why
        elif n:
            self._n = n
        return self.start()

    def end(self, ranks: Sequence[int]) -> None:
        """End the engines of ``ranks``, even busy ones, and the runs that they take part in.

        `heal` starts them again. Raises ClusterError as `heal`, and when one of these runs does not end.
        """
        engines = self._connected()
        if engines.end is None:
            raise ClusterError(NOT_HERE)
        check_ranks(self.n, ranks)
        for rank in ranks:
            engines.end(rank, "was ended by `%ring restart --rank`")
        for run in self.runs.in_progress:
            if not run.ranks.isdisjoint(ranks) and not run.stop(_SECONDS_TO_END):
                raise ClusterError(f"run {run.log.title} has not ended: {run.describe()}; {run.advice()}")

    def heal(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Start dead engines again, or the engines of ``ranks``, dead or alive; returns their ranks.

        All others keep their variables, and lose MPI.COMM_WORLD. Raises ClusterError when another rank runs a cell or
        dies meanwhile, and if all engines end with one, as under a site's mpiexec. After an interrupt, call it again.
        """
        engines, processes, lost = self._changeable("heal")
        if ranks is None:
            lost.look(engines.all)
        wanted = sorted(engines.deaths() if ranks is None else set(ranks))
        if wanted:
            check_ranks(self.n, wanted)
            self.runs.require_idle(engines, True, but=wanted)
            self._start_engines(engines, processes, lost, wanted, self.n)
        return wanted

    def grow(self, n: int, hosts: str = "") -> list[int]:
        """Start engines until there are ``n``; returns their ranks. All others keep their variables, as in `heal`.

        ``hosts`` (``"a:4,b:4"``) replaces the hosts and slots of the cluster. Raises ClusterError as `heal`, for too
        few slots, and when there are as many engines already.
        """
        engines, processes, lost = self._changeable("grow")
        if n <= self.n:
            raise ClusterError(f"the cluster has {self.n} engines already; `%ring resize {n}` ends some")
        where = tuple(parse_hosts(hosts)) or self._hosts
        if only_here(self._hosts) and not only_here(where):
            raise ClusterError(
                "engines of other hosts cannot reach a cluster that was started for this host alone; `%ring stop`, "
                f"then `%ring start -n {n} --hosts {hosts}`"
            )
        if not only_here(where):
            try:
                check_slots(n, where)
            except ValueError as error:
                raise ClusterError(f"{error}: `%ring resize {n} --hosts a:4,b:4`") from None
        elif problem := too_many_ranks(n):
            raise ClusterError(problem)
        require_processes(n, where)
        require_descriptors(n)
        self.runs.require_idle(engines, True)
        slots = slots_by_name(where)
        for name in dict.fromkeys([*slots, *slots_by_name(self._hosts)]):  # the new ones first: there is always one
            processes.request("slots", slots.get(name, 0), name)
        self._hosts = where
        processes.request("size", n)
        new = list(range(self.n, n))
        self._start_engines(engines, processes, lost, new, n)
        return new

    def shrink(self, n: int) -> list[int]:
        """End all engines but the first ``n``; returns the ranks that were ended. The others keep their variables.

        Raises ClusterError as `heal`, and when there are not more than ``n``.
        """
        engines, processes, lost = self._changeable("shrink")
        if not 1 <= n < self.n:
            raise ClusterError(f"expected 1 to {self.n - 1} ranks to keep, got {n}; the cluster has {self.n} engines")
        self.runs.require_idle(engines, True)
        dropped = list(range(n, self.n))
        self._begin_formation(engines, processes)
        remove(engines, lost, processes.request, n, self.n, self._formation)
        self._take_size(n)
        meet(engines, engines.living(), self._formation, n)
        self._met = True
        self._describe(engines, processes)
        return dropped

    def _changeable(self, what: str) -> tuple[Engines, Processes, LostRanks]:
        """Engines, processes and deaths. Raises ClusterError if no engine can be started or ended alone."""
        engines, processes = self._connected(), self._processes
        if processes is None or processes.lost is None:
            raise ClusterError(NOT_HERE)
        if self.foreign:
            raise ClusterError(f"the notebook that has started this cluster can {what} it")
        return engines, processes, processes.lost

    def _start_engines(
        self, engines: Engines, processes: Processes, lost: LostRanks, ranks: Sequence[int], n: int
    ) -> None:
        self._begin_formation(engines, processes)
        heal(engines, lost, processes.request, ranks, n, self.directory, self._keep, self._formation)
        if n != self.n:
            self._take_size(n)
        self._met = True
        self._describe(engines, processes)
        self._synced_folder.bring(engines, ranks)

    def _take_size(self, n: int) -> None:
        self._n, self._why = n, "as asked for"

    def _engines_of(self, client: Any, processes: Processes, trouble: Callable[[], str]) -> Engines:
        if processes.lost is None:
            return Engines(client, trouble, processes.deaths)
        kill = None if self.foreign else functools.partial(end, processes.lost, processes.request)
        return Engines(client, trouble, processes.deaths, kill, functools.partial(processes.request, "interrupt"))

    @property
    def running(self) -> bool:
        """Whether the cluster can run a cell."""
        return self._engines is not None and not self._engines.trouble()

    def serves(self, n: int | None = None, hosts: str = "", keep: bool = False) -> bool:
        """Whether it has these properties; any value will do for those left out."""
        return (
            (n is None or n == self.n)
            and (not hosts or tuple(parse_hosts(hosts)) == self._hosts)
            and (not keep or self._keep)
        )

    @property
    def death(self) -> Death | None:
        """Why the cluster died; None while a rank lives and when it was stopped."""
        return None if self._processes is None else self._processes.death

    def status(self) -> list[EngineStatus]:
        """Pid, host, device, state and memory of each rank, by rank; also of those that have died.

        Raises ClusterError when the cluster does not run.
        """
        return engine_statuses(self._connected(), self.runs.busy())

    def run(
        self,
        source: str,
        *,
        n: int | None = None,
        ranks: Sequence[int] | None = None,
        name: str = "",
        timeout: float = 0.0,
        first_line: int = 1,
        options: Mapping[str, Any] | None = None,
        only: Sequence[int] = (),
    ) -> Run:
        """Run ``source`` as a cell on ranks 0..n-1 (all by default); returns at once, `Run.wait` waits.

        ``ranks`` names other ranks, at least one and each once: in the run they are ranks 0, 1, ... in this order.
        After ``timeout`` seconds (0: never) the run is stopped. ``first_line`` is the number that errors give to the
        first line of ``source``. With ``only`` just these ranks execute it; rank and size count all ranks, and a
        collective raises, because the others do nothing. Raises ClusterError when there are fewer than ``n`` engines or
        no such ranks, one of them or the cluster has died, or one of them executes another run.
        """
        own = {"n": n, "ranks": ranks, "timeout": timeout, "first_line": first_line}
        return self.send(source, CellOptions.of({**(options or {}), **own}), name, only)

    def send(self, source: str, options: CellOptions, name: str, only: Sequence[int] = ()) -> Run:
        """As `run`, with all options of a cell."""
        ranks = self.chosen(options.n, options.ranks)
        engines = self._idle(ranks if self._met else None)
        require_living(engines, ranks)
        if not self._met and self._processes is not None:  # since a heal that failed
            self._begin_formation(engines, self._processes)
            meet(engines, self.living, self._formation, self.n)
            self._met = True
        engines.hear(ranks)
        batch = {"job": job_name(), "end": walltime().end} if walltime().end else {}
        return self.runs.add(send(engines, self.directory.name, source, ranks, name, options, only, batch))

    def chosen(self, n: int | None = None, ranks: Sequence[int] | None = None) -> Sequence[int]:
        """The ranks that a cell for ``n`` ranks, or for ``ranks``, runs on. Raises ClusterError as `run` for others."""
        self._connected()
        if ranks is None:
            ranks = range(self.n if n is None else n)
            self.check_size(len(ranks))
        check_ranks(self.n, ranks)
        return ranks

    def check_size(self, size: int) -> None:
        """Raise ClusterError when a cell cannot run on ``size`` ranks."""
        if not 1 <= size <= self.n:
            raise ClusterError(
                f"expected 1 to {self.n} ranks, got {size}; `%ring restart -n {max(size, 1)}` starts that many"
            )

    def push(self, values: Mapping[str, Any]) -> None:
        """Copy variables to every rank. Raises ClusterError that names one which cannot be pickled."""
        engines = self._idle()
        try:
            pickled = dumps(dict(values))
        except Exception as error:
            raise ClusterError(f"{_culprit(values)} cannot be pickled for the ranks: {error}") from None
        engines.call(f"{_NAMESPACE}:put", pickled)

    def pull(self, name: str, rank: int = 0) -> Any:
        """A copy of the variable ``name`` of ``rank``. Raises ClusterError when it is missing or cannot be pickled."""
        check_ranks(self.n, [rank])
        engines = self._idle([rank])
        (data,) = engines.call(f"{_NAMESPACE}:get", name, ranks=[rank])
        return pickle.loads(data)

    def variables(self, name: str = "") -> list[dict[str, str]]:
        """Descriptions of the variable ``name`` (of all variables without it) by name: one dict per rank.

        Empty for ranks that have died.
        """
        engines = self._idle()
        living = engines.living()
        found = dict(zip(living, engines.call(f"{_NAMESPACE}:describe", name, ranks=living), strict=True))
        return [found.get(rank, {}) for rank in range(self.n)]

    def names(self, path: str = "") -> list[str]:
        """The names on the first living rank, or those after ``path`` and a dot, also while a run is in progress.

        Raises ClusterError when it is slow.
        """
        found: list[str] | None = self._asked_beside("names", path)
        if found is None:
            raise ClusterError(f"no answer from the engines within {_SECONDS_TO_NAME:g} s")
        return found

    def help(self, path: str) -> str:
        """Signature and documentation of a name on rank 0, such as ``ring.allreduce``, also while a run is in progress.

        Empty where rank 0 has no such name, or is slow.
        """
        return str(self._asked_beside("help_on", path) or "")

    def _asked_beside(self, function: str, path: str) -> Any:
        """What the first living rank knows of a name, asked beside its cell; None if it is slow."""
        engines = self._connected()
        first = engines.living()[:1]
        return engines.call_beside(f"{_NAMESPACE}:{function}", path, ranks=first, timeout=_SECONDS_TO_NAME)[0]

    def sync(self) -> Synced:
        """Bring the modules that have changed in this notebook's folder to all ranks, and reload them there.

        Raises ClusterError when a module cannot be loaded, a run is in progress or the folder holds too much.
        """
        return self._synced_folder.sync(self._idle())

    def _begin_sync(self, engines: Engines) -> None:
        """Bring this notebook's modules to engines of other hosts; engines of this host see its folder."""
        self._synced_folder = SyncedFolder(Path.cwd())
        with suppress(ClusterError):  # the folder holds too much: the next sync reports it
            if all(engine.local for engine in engines.all):
                self._synced_folder.assume_synced()
            else:
                self._synced_folder.sync(engines)

    def write_checkpoint(self) -> None:
        """Have the run in progress write a checkpoint at its next step, if it uses `ring.checkpoint`."""
        self._connected().call_beside("ring_notebook.core.run_options:ask_for_checkpoint")

    def snapshot(self, name: str, setup: Sequence[RunRecord] = ()) -> Snapshot:
        """Keep the variables of all ranks under ``name``, in place of an older snapshot of this name.

        ``setup`` are the runs of set-up cells to keep with them. Raises RingError when it cannot be written, and as
        `push` while a run is in progress.
        """
        return snapshots.keep(self._idle(), name, setup)

    def restore(self, name: str, size: int | None = None) -> str:
        """Replace the variables of all ranks by those of a snapshot; returns in words what was restored.

        The snapshot may be of another number of ranks. It is restored for a run on the first ``size`` ranks, by default
        all; later ranks are copies of these. Raises RingError if no complete snapshot has this name, or a rank cannot
        load it: then no rank has changed.
        """
        if size is not None:
            self.check_size(size)
        return snapshots.bring_back(self._idle(), snapshots.find(name), size)

    def stacks(self) -> list[Stack]:
        """Where each rank is now, by rank: also while a run is in progress, and while native code runs.

        Raises ClusterError when the cluster does not run.
        """
        return stacks(self._connected(), self.directory / "log")

    def free(self) -> list[dict[str, Any]]:
        """Have all ranks forget the frames of a failed cell and give cached memory back; by rank what was freed.

        Each has ``held``, rows of variable, device and bytes, and the bytes ``freed`` and ``cached``. Empty for ranks
        that have died. Raises ClusterError while a run is in progress.
        """
        engines = self._idle()
        living = engines.living()
        found = dict(zip(living, engines.call("ring_notebook.engine.held_memory:free", ranks=living), strict=True))
        return [found.get(rank, {}) for rank in range(self.n)]

    def debug(self, rank: int, command: str = "") -> tuple[str, bool]:
        """What pdb on ``rank`` answers to ``command``, and whether it takes another.

        pdb is at the exception that ended the last cell there, in the frame that raised; an empty command shows the
        frame. Raises ClusterError when there is none. An interrupt of this process ends the command.
        """
        check_ranks(self.n, [rank])
        engines = self._idle([rank])
        try:
            text, goes_on = engines.call("ring_notebook.engine.debuggers:answer", command, ranks=[rank])[0]
        except KeyboardInterrupt:
            engines.interrupt(DEBUGGER, [rank])
            raise
        return text, goes_on

    def _connected(self) -> Engines:
        if self._engines is None:
            raise ClusterError("there is no cluster; `%ring start` starts one")
        if trouble := self._engines.trouble():
            raise ClusterError(trouble)
        return self._engines

    def _idle(self, ranks: Sequence[int] | None = None) -> Engines:
        """The engines; all of them, or ``ranks``, are idle. Raises ClusterError when one executes a run."""
        engines = self._connected()
        self.runs.require_idle(engines, self._processes is not None and self._processes.lost is not None, ranks)
        return engines

    def _prepare(self, engines: Engines, processes: Processes) -> None:
        replaceable, trouble = processes.lost is not None, processes.trouble_at_start
        engines.all = prepare_engines(engines, self.n, self.directory, self._keep, replaceable, trouble=trouble)
        if processes.lost is not None:
            processes.lost.watch(engines.all)
            self._formation = 1
            meet(engines, range(self.n), self._formation, self.n)
        self._met = True
        self._describe(engines, processes)

    def _begin_formation(self, engines: Engines, processes: Processes) -> None:
        self._met = False
        self._formation += 1
        self._describe(engines, processes)  # the next heal begins a newer one

    def _describe(self, engines: Engines, processes: Processes) -> None:
        """Write down what another kernel needs to attach to this cluster."""
        cluster_folders.write(
            self.directory,
            {
                "n": self.n,
                "hosts": ",".join(map(str, self._hosts)),
                "why": self.why,
                "keep": self._keep,
                "met": self._met,
                "formation": self._formation,
                "controller": processes.pids["controller"],
                "launcher": processes.pids["engines"],
                "engines": [asdict(engine) for engine in engines.all],
            },
        )

    def _follow_runs(self, engines: Engines) -> None:
        """Watch the runs in progress in a cluster that another kernel has started."""
        for log in logs_in_progress(runs_directory(), self.directory, self.foreign):
            ranks = log.environment.get("ranks")
            self.runs.add(Run(engines.part(ranks) if ranks else engines, log))

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "died" if self.death else "stopped"
        return f"<Cluster of {self.n} engines ({self.why}): {state}>"


def _culprit(variables: Mapping[str, Any]) -> str:
    """The first of ``variables`` that cannot be pickled."""
    for name, value in variables.items():
        try:
            dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return ", ".join(variables)
