"""The cluster that a notebook's cells run on: started, stopped, asked, given and taken variables."""

from __future__ import annotations

import atexit
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.hardware import cores
from ring_notebook.launch.launchers.hosts import parse_hosts
from ring_notebook.notebook.cluster import discovery, push_pull
from ring_notebook.notebook.cluster.death import Death
from ring_notebook.notebook.cluster.default_size import choose_size
from ring_notebook.notebook.cluster.processes import Processes
from ring_notebook.notebook.engines import Engine, Engines
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.takeover import FollowedLog, TakenOverLog, run_in_progress

__all__ = ["Cluster"]

_START_TIMEOUT = 120.0
_ATTACH_TIMEOUT = 10.0
# How long a new run waits for ranks that are still ending the one before.
_SECONDS_TO_SETTLE = 2.0


class Cluster:
    """``n`` engines, one per rank, and their controller.

    ``hosts`` (``"a:4,b:4"``) defaults to the allocation of a batch system, else to this machine; ``n`` to the number of
    slots, else of GPUs, else of cores, at least 2. With ``keep`` it outlives the kernel, and `attach` finds it again;
    otherwise it ends when the kernel does, however that happens. As a context manager it starts and stops.
    """

    def __init__(self, n: int | None = None, hosts: str = "", *, keep: bool = False) -> None:
        if n is not None and n < 1:
            raise ValueError(f"a cluster needs at least one engine, not {n}")
        self._named = parse_hosts(hosts)
        self._choose_size(n)
        self._keep = keep
        self.foreign = False  # started by another notebook that still lives
        self._processes: Processes | None = None
        self._engines: Engines | None = None
        self._directory = Path()
        self.last_run: Run | None = None

    def _choose_size(self, n: int | None) -> None:
        size = choose_size(n, self._named)
        self.n, self._hosts, self.why = size.n, size.hosts, size.why

    def start(self) -> Cluster:
        """Start controller and engines; returns when they can run a cell.

        Raises ClusterError, or MPIMissingError or CoreMissingError, with what to do.
        """
        if self.running:
            raise ClusterError(f"the cluster of {self.n} engines is already running; `%ring stop` ends it")
        started = time.monotonic()
        self.foreign = False
        self._directory = discovery.new_directory()
        atexit.register(self._leave_or_stop)
        try:
            self._processes = Processes.launch(self._directory, self.n, self._hosts, self._keep)
            client = self._processes.connect(_START_TIMEOUT)
            self._engines = Engines(client, self._processes.trouble)
            self._engines.wait_for(self.n, _START_TIMEOUT)
            self._prepare(self._engines)
        except BaseException as error:
            message = self._processes.not_started(str(error)) if self._processes else str(error)
            self.stop()
            if isinstance(error, ClusterError):
                raise ClusterError(message) from None
            raise
        self.seconds_to_start = time.monotonic() - started
        return self

    @classmethod
    def attach(cls) -> Cluster:
        """The newest running cluster that was started from this folder, by another kernel.

        `last_run` is the run that goes on in it. Raises ClusterError when there is none.
        """
        for directory in discovery.running():
            about = discovery.read(directory)
            if not about:  # removed meanwhile by the kernel that has ended it
                continue
            cluster = cls(about["n"], keep=about["keep"])
            cluster.why = about["why"]
            cluster.foreign = discovery.is_alive(about["kernel"]) and about["kernel"] != os.getpid()
            cluster._directory = directory
            atexit.register(cluster._leave_or_stop)
            try:
                cluster._processes = Processes.attach(directory)
                client = cluster._processes.connect(_ATTACH_TIMEOUT)
                cluster._engines = Engines(client, cluster._processes.trouble)
                cluster._engines.all = [Engine(**engine) for engine in about["engines"]]
                cluster._engines.wait_for(cluster.n, _ATTACH_TIMEOUT)
                cluster._follow_run(cluster._engines)
                return cluster
            except BaseException as error:
                cluster._end(leave=True)
                if not isinstance(error, ClusterError):  # another cluster may answer
                    raise
        raise ClusterError(
            "no cluster runs that was started from this folder; `%ring start --keep` starts one that stays"
        )

    def stop(self) -> None:
        """End all engines and the controller; returns when they are gone. Does nothing when none runs.

        A cluster that another living notebook has started goes on; this one only leaves it.
        """
        self._end(leave=self.foreign)

    def _leave_or_stop(self) -> None:
        """What the end of this kernel means for the cluster."""
        self._end(leave=self.foreign or self._keep)

    def _end(self, leave: bool) -> None:
        atexit.unregister(self._leave_or_stop)
        if leave and self.last_run is not None:
            self.last_run.leave()  # before it notes that there are no engines any more, and takes that for their end
        if self._engines is not None:
            self._engines.close()
            self._engines = None
        if self._processes is not None:
            if leave:
                self._processes.leave()
            else:
                self._processes.stop()
            self._processes = None
        self.last_run = None
        if self._directory.name and not leave:
            shutil.rmtree(self._directory, ignore_errors=True)

    def restart(self, n: int | None = None) -> Cluster:
        """Stop what is left and start ``n`` engines anew, by default as many. Their variables are gone."""
        self.stop()
        if n:
            self._choose_size(n)
        return self.start()

    @property
    def running(self) -> bool:
        """Whether a cell can be sent."""
        return self._engines is not None and not self._engines.trouble()

    def serves(self, n: int | None = None, hosts: str = "", keep: bool = False) -> bool:
        """Whether it is what somebody wants who would start one like this; what is left out may be anything."""
        return (
            (n is None or n == self.n)
            and (not hosts or tuple(parse_hosts(hosts)) == self._hosts)
            and (not keep or self._keep)
        )

    @property
    def death(self) -> Death | None:
        """What ended the cluster, when it ended by itself."""
        return None if self._processes is None else self._processes.death

    def status(self) -> list[dict[str, Any]]:
        """A dict for each engine: rank, host, pid, gpu, state. Raises ClusterError without a cluster."""
        engines = self._connected()
        if self.last_run is not None and self.last_run.done:
            self.last_run.settle(_SECONDS_TO_SETTLE)
        busy = self.last_run.busy if self.last_run is not None else []
        return [
            {
                "rank": engine.rank,
                "host": engine.host,
                "pid": engine.pid,
                "gpu": engine.gpu,
                "state": f"in run {self.last_run.log.run}" if self.last_run and engine.rank in busy else "idle",
            }
            for engine in engines.all
        ]

    def run(
        self,
        source: str,
        *,
        n: int | None = None,
        name: str = "",
        timeout: float = 0.0,
        first_line: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> Run:
        """Start ``source`` as a cell on ranks 0..n-1 (all by default); `Run.wait` waits for it.

        ``timeout`` (seconds) stops it by itself. ``first_line`` is the number of its first line where the
        user sees it. Raises ClusterError when ``n`` is more than there are, the cluster has died, or a run is
        under way.
        """
        self._connected()
        size = self.n if n is None else n
        self.check_size(size)
        engines = self._idle()
        run = _run_name()
        log = RunLog(
            Path(config().runs_dir).absolute() / run,
            run,
            name,
            size,
            source,
            {**(options or {}), "first_line": first_line},
            {
                "cluster": self._directory.name,
                "engines": self.n,
                "hosts": sorted({engine.host for engine in engines.all}),
                "cores": cores(),
                "gpus": [engine.gpu for engine in engines.all[:size] if engine.gpu],
                "directory": os.getcwd(),
            },
        )
        # Seconds since the epoch of the clock, so that the numbers increase also when another notebook
        # attaches.
        epoch = time.time_ns() // 1_000_000
        self.last_run = Run(engines, log, timeout=timeout).start(epoch, first_line, log.put)
        return self.last_run

    def check_size(self, size: int) -> None:
        """Raise ClusterError when a cell cannot run on ``size`` ranks."""
        if not 1 <= size <= self.n:
            raise ClusterError(
                f"{size} ranks were asked for, the cluster has {self.n}; start it with `%ring restart -n {size}`"
            )

    def push(self, values: Mapping[str, Any]) -> None:
        """Give every rank a copy of the variables. Raises ClusterError for one that cannot be pickled."""
        push_pull.push(self._idle(), values)

    def pull(self, name: str, rank: int = 0) -> Any:
        """The value of ``name`` on ``rank``. Raises ClusterError when it is missing or cannot be pickled."""
        return push_pull.pull(self._idle(), name, rank)

    def variables(self, name: str = "") -> list[dict[str, str]]:
        """What each rank has under ``name`` (under all its names): descriptions by name, in order of rank."""
        return push_pull.describe(self._idle(), name)

    def names(self, path: str = "") -> list[str]:
        """The names that rank 0 has, or those behind ``path`` and a dot. Raises ClusterError also when it is slow."""
        return push_pull.names(self._idle(), path)

    def _connected(self) -> Engines:
        if self._engines is None:
            raise ClusterError("there is no cluster; `%ring start` starts one")
        if trouble := self._engines.trouble():
            raise ClusterError(trouble)
        return self._engines

    def _idle(self) -> Engines:
        """The engines when none is at work. Raises ClusterError when a run occupies one."""
        engines = self._connected()
        run = self.last_run
        if run is not None:
            if not run.done:
                raise ClusterError(
                    f"run {run.log.name or run.log.run} is under way ({run.describe()}); `%ring interrupt` stops it, "
                    "as its panel's Stop and `Run.stop()` do"
                )
            if not run.settle(_SECONDS_TO_SETTLE):
                raise ClusterError(f"{run.describe()} and has not stopped; `%ring restart` ends it")
        return engines

    def _prepare(self, engines: Engines) -> None:
        ranks = range(self.n)
        found = engines.call(
            "ring_notebook.engine.setup:prepare",
            str(self._directory),
            self._keep,
            ranks=ranks,
            timeout=_START_TIMEOUT,
        )
        wrong = [about for rank, about in enumerate(found) if (about["rank"], about["size"]) != (rank, self.n)]
        if wrong:
            raise ClusterError(
                f"the engines are not the {self.n} ranks of one MPI job (one is rank {wrong[0]['rank']} of "
                f"{wrong[0]['size']}): their launcher and mpi4py belong to different MPIs; see RING_MPIEXEC"
            )
        engines.all = [Engine(about["rank"], about["host"], about["pid"], about["gpu"]) for about in found]
        discovery.write(
            self._directory,
            {
                "n": self.n,
                "why": self.why,
                "keep": self._keep,
                "controller": self._processes.controller if self._processes else 0,
                "engines": [asdict(engine) for engine in engines.all],
            },
        )

    def _follow_run(self, engines: Engines) -> None:
        """Take part in the run that goes on in a cluster that another kernel has started."""
        directory = run_in_progress(Path(config().runs_dir).absolute(), self._directory.name)
        if directory is not None:
            log = FollowedLog(directory) if self.foreign else TakenOverLog(directory, self._directory / "spool")
            self.last_run = Run(engines, log).follow()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "died" if self.death else "stopped"
        return f"<Cluster of {self.n} engines ({self.why}): {state}>"


def _run_name() -> str:
    now = time.time()
    # To the millisecond, so that names sort as the runs were started.
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now * 1000) % 1000:03d}{uuid.uuid4().hex[:2]}"
