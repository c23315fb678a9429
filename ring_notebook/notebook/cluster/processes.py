"""The processes of a cluster, controller and engines: started, watched and ended together."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import ipyparallel
from ipyparallel.cluster.launcher import LocalControllerLauncher, MPIEngineSetLauncher
from traitlets import Bool, Dict, List, Unicode, default
from traitlets.config import Config

from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.files.private_files import open_private
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host, check_interface, master_of, only_here
from ring_notebook.launch.launchers.own_launchers import processes_allowed
from ring_notebook.launch.supervisor.engine_supervisor import Request, make_requests, request
from ring_notebook.launch.supervisor.local_ranks import SHARED_IMPORTS
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.launch.supervisor.stderr_reports import split_reports
from ring_notebook.machine.os_calls import Wake, exit_descriptor, resource_limits, set_resource_limits
from ring_notebook.machine.own_python import module_command
from ring_notebook.notebook.cluster.death import Death, by_batch_system, explain, explain_failure, not_started, tail
from ring_notebook.notebook.cluster.death_watch import LostRanks
from ring_notebook.notebook.cluster.engine_forks import EngineForks, shared_imports
from ring_notebook.notebook.record.run_files import read_json, read_text
from ring_notebook.rank.rank_variables import MASTER

# A heartbeat registers an engine, so a short period starts a cluster sooner. Deaths are noticed at the processes
# themselves; the many misses allow ranks to compute for minutes without an answer.
_HEARTBEAT_MS = 100
_HEARTBEAT_MISSES = 3000
_CONTROLLER_ARGS = [
    "--nodb",
    # Schedulers as threads: one process instead of eight, which start sooner and die with it.
    "--usethreads",
    "--IPController.broadcast_scheduler_depth=0",
    f"--HeartMonitor.period={_HEARTBEAT_MS}",
    f"--HeartMonitor.max_heartmonitor_misses={_HEARTBEAT_MISSES}",
]
_ENGINE_ARGS = ["--log-level=ERROR", "--IPEngine.timeout=60", "--IPEngine.wait_for_url_file=60"]
_REQUESTS = "requests"
_SECONDS_TO_TERMINATE = 2
_SECONDS_TO_FORGET = 1  # the period at which ipyparallel's threads poll their processes
_POLL = 0.02


class _PrivateLog:
    """Makes the file that a launcher's processes write to, which ipyparallel leaves to the umask."""

    output_file: str

    def start(self, *arguments: Any) -> Any:
        open_private(Path(self.output_file), "ab").close()
        return super().start(*arguments)  # type: ignore[misc]


class ControllerLauncher(_PrivateLog, LocalControllerLauncher):  # type: ignore[misc]
    """Starts the controller so that it ends with the kernel."""

    keep = Bool(False, config=True, help="outlive the kernel")

    @default("controller_cmd")
    def _controller_cmd(self) -> list[str]:
        return module_command("ring_notebook.notebook.cluster.controller")

    def find_args(self) -> list[str]:
        command: list[str] = super().find_args()
        return command if self.keep else wrap(command)

    def get_output(self, remove: bool = False) -> str:
        return _kept_output(self)


class EngineLauncher(_PrivateLog, MPIEngineSetLauncher):  # type: ignore[misc]
    """Starts the engines with `find_launcher`, so that they end with the kernel."""

    keep = Bool(False, config=True, help="outlive the kernel")
    hosts: Any = List([], config=True, help="(name, slots) of the hosts, empty for this one")
    requests = Unicode("", config=True, help="the pipe through which our supervisor starts engines again")
    lent: Any = Dict({}, config=True, help="variables with which a supervisor reaches places that were lent")
    forks = Unicode("", config=True, help="the address of the process that forks them; empty for one of the supervisor")

    @property
    def program(self) -> list[str]:
        return module_command("ring_notebook.engine.engine_program")

    def find_args(self) -> list[str]:
        hosts = [Host(*host) for host in self.hosts]
        launcher = find_launcher(requests=self.requests)
        program = launcher.supervised([*self.program, *self.program_args])
        # A kernel that a launcher has started as a rank: its engines are ranks of another job.
        inherited = sorted(os.environ.keys() - without_outer_job(os.environ).keys())
        command = ["env", *(f"--unset={name}" for name in inherited), *launcher.command(program, self.n, hosts)]
        return command if self.keep else wrap(command)

    def get_env(self) -> dict[str, str]:
        hosts = [Host(*host) for host in self.hosts]
        shared = {SHARED_IMPORTS: " ".join(filter(None, (self.forks, *shared_imports())))}
        return {**super().get_env(), MASTER: master_of(hosts), **find_launcher().environment(), **shared, **self.lent}

    def get_output(self, remove: bool = False) -> str:
        return _kept_output(self)


def _kept_output(launcher: Any) -> str:
    """A launcher's log. ipyparallel removes it when the process ends, which is when it is needed."""
    return read_text(Path(launcher.output_file))


class Processes:
    """A controller and engines, and the directory that holds their connection files and logs.

    One thread starts, watches and ends them: the Linux kernel ends our children with the thread that started
    them, so this thread lives as long as they do. When one of them ends by itself, the thread ends the other one
    and sets ``death`` to the reason.
    """

    def __init__(self, cluster: ipyparallel.Cluster, n: int, requests: Path, forks: EngineForks | None = None) -> None:
        self.death: Death | None = None
        self._forks = forks
        self._requests = requests
        self.lost: LostRanks | None = None
        """The engines that have died, where the others live on and `request` can start them again; else None."""
        self._cluster = cluster
        self._n = n  # engines to start, 0 when they run already
        self._started = Event()
        self._error: BaseException | None = None
        self._output = ""  # what the engines have written, when they have ended
        self._asked = ""  # "stop" or "leave", for the thread
        self._wake = Wake()
        self._thread = Thread(target=self._live, name="ring-cluster", daemon=True)
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # an interrupt: nobody else would end the processes
            self.stop()
            raise
        if self._error is not None:
            self._thread.join()  # it ends what has started
            self._wake.close()
            raise self._error
        if requests.exists():
            self.lost = LostRanks(Path(self._cluster.engine_set.output_file), requests.parent / "log")

    @classmethod
    def launch(
        cls,
        directory: Path,
        n: int,
        hosts: Sequence[Host],
        keep: bool,
        lent: Mapping[str, str],
        forks: EngineForks | None = None,
    ) -> Processes:
        """Start ``n`` engines, with ``lent`` variables; returns when they run, before they can be talked to.

        ``forks`` forks them, in place of a process of the supervisor, and is closed when they die. Raises
        MPIMissingError, and ClusterError for more than this host can start, before it starts anything.
        """
        requests = directory / _REQUESTS
        # Where each rank acts as a host of its own, the others do not notice its death.
        pipe = str(requests) if config().algorithm != "ring" else ""
        try:
            launcher = find_launcher(requests=pipe)
            launcher.command((), n, hosts)
            check_interface(config().interface, hosts)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        if launcher.starts_again:
            try:
                make_requests(requests)
            except OSError:  # a file system without named pipes: no engine is started again, and all end with one
                launcher = find_launcher()
        pipe = pipe if launcher.starts_again else ""
        address = forks.address if forks is not None else ""
        return cls(_cluster(directory, hosts, keep, pipe, lent, address), n, requests, forks)

    @classmethod
    def attach(cls, directory: Path) -> Processes:
        """Those that another kernel has started in ``directory``. Raises ClusterError when they have ended."""
        file = directory / "security" / f"cluster-{directory.name}.json"
        about = read_json(file)
        if not about:
            raise ClusterError(f"no cluster runs in {directory}")
        for kind in ("controller", "engines"):
            # ipyparallel writes "module:Class" for a launcher that is not its own, and reads "module.Class".
            about[kind]["class"] = about[kind]["class"].replace(":", ".")
        cluster = ipyparallel.Cluster.from_dict(
            about, cluster_file=str(file), load_profile=False, config=_config(), log=_silent()
        )
        if not cluster.controller or not cluster.engines:
            raise ClusterError(f"the cluster in {directory} has ended")
        return cls(cluster, 0, directory / _REQUESTS)

    def connect(self, timeout: float) -> Any:
        """An ipyparallel client. Raises ClusterError when the controller does not answer in time."""
        connection = Path(self._cluster.controller.connection_files["client"])
        deadline = monotonic() + timeout
        while not self.trouble() and monotonic() < deadline:
            try:
                return ipyparallel.Client(str(connection), timeout=max(1.0, deadline - monotonic()))
            except TimeoutError:
                break
            except (OSError, ValueError):  # not there yet, or half written
                sleep(_POLL)
        raise ClusterError(f"the controller does not answer: {tail(self.log('controller')) or 'its log is empty'}")

    def trouble(self) -> str:
        """Why these processes answer no more; empty while both run."""
        if self._thread.is_alive():
            return ""
        return str(self.death or "the cluster was stopped")

    def trouble_at_start(self) -> str:
        """`trouble`, or why an engine has ended instead of starting."""
        failures = split_reports(self.log("engines").encode())[1] if self.lost else []
        return self.trouble() or "".join(explain_failure(failure) for failure in failures[:1])

    def deaths(self) -> dict[int, Death]:
        """The ranks that have died, and why."""
        if self.death is not None and self.death.rank >= 0:
            return {self.death.rank: self.death}
        return self.lost.deaths if self.lost else {}

    def request(self, what: Request, number: int, name: str = "") -> None:
        """Ask the supervisor for something, as `request` says. Raises ClusterError when there is none."""
        try:
            request(self._requests, what, number, name)
        except OSError as error:
            why = self.trouble() or f"the supervisor of the engines does not answer: {error}"
            raise ClusterError(why) from None

    @property
    def controller(self) -> int:
        """The controller's process id; it runs on this host."""
        return int(self._cluster.controller.pid)

    def not_started(self, reason: str) -> str:
        """The message for a start that failed for this ``reason``, or because one of both processes has ended."""
        return not_started(self.death.reason if self.death else reason, self._output or self.log("engines"))

    def stop(self) -> None:
        """End both and return when they have ended."""
        self._ask("stop")

    def leave(self) -> None:
        """Stop watching them and let them run."""
        self._ask("leave")

    def _ask(self, what: str) -> None:
        self._asked = self._asked or what
        if self.lost is not None:
            lost, self.lost = self.lost, None
            lost.close()
        if self._wake.fileno() >= 0:
            self._wake.set()
            self._thread.join()
            self._wake.close()

    def log(self, which: str) -> str:
        """What ``controller`` or ``engines`` have written to their standard output and error so far."""
        launcher = self._cluster.controller if which == "controller" else self._cluster.engine_set
        return _kept_output(launcher) if launcher else ""

    def _live(self) -> None:
        try:
            if self._n:
                self._cluster.start_controller_sync()
                self._cluster.start_engines_sync(self._n)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        ended = self._wait() if self._error is None else ""
        output = self._output = self.log("engines")
        if ended == "controller":
            # Its heart monitor is a child that only the controller itself would have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._cluster.controller.pid, signal.SIGKILL)
        if self._asked != "leave":
            self._end()
        elif not self._n:
            # Each launcher has a thread that waits for its process as long as this seems to run.
            for launcher in (self._cluster.controller, self._cluster.engine_set):
                launcher.state = "after"
        if ended:
            if self._forks is not None:
                self._forks.close()
            lost, logs = self.lost, Path(self._cluster.profile_dir) / "log"
            last = lost.last() if lost and ended == "engines" else None
            self.death = by_batch_system(last or explain(ended, output, logs))

    def _wait(self) -> str:
        """Return when one of both has ended (its name), or `stop` or `leave` was called (nothing)."""
        watched = {self._wake.fileno(): ""}
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            for name, launcher in (("controller", self._cluster.controller), ("engines", self._cluster.engine_set)):
                try:
                    descriptor = exit_descriptor(launcher.pid)
                except ProcessLookupError:
                    return name
                watched[descriptor] = name
                poll.register(descriptor, select.POLLIN)
            return watched[poll.poll()[0][0]]
        finally:
            for descriptor in watched.keys() - {self._wake.fileno()}:
                os.close(descriptor)

    def _end(self) -> None:
        if self._cluster.engines:
            self._cluster.stop_engines_sync()
        self._cluster.stop_controller_sync()


def _config() -> Config:
    """Settings for clusters of this kernel and of others."""
    settings = Config()
    settings.LocalProcessLauncher.stop_seconds_until_kill = _SECONDS_TO_TERMINATE
    settings.LocalProcessLauncher.poll_seconds = _SECONDS_TO_FORGET
    return settings


def _cluster(
    directory: Path, hosts: Sequence[Host], keep: bool, requests: str, lent: Mapping[str, str], forks: str
) -> ipyparallel.Cluster:
    remote = not only_here(hosts)
    settings = _config()
    settings.ControllerLauncher.keep = settings.EngineLauncher.keep = keep
    settings.EngineLauncher.hosts = [(host.name, host.slots) for host in hosts]
    settings.EngineLauncher.requests = requests
    settings.EngineLauncher.lent = dict(lent)
    settings.EngineLauncher.forks = forks
    # A nanny relays interrupts to an engine of another host, a process for each. Our supervisor does that too.
    settings.EngineLauncher.engine_args = [*_ENGINE_ARGS, f"--IPEngine.enable_nanny={remote and not requests}"]
    cluster = ipyparallel.Cluster(
        controller=ControllerLauncher,
        engines=EngineLauncher,
        cluster_id=directory.name,
        profile_dir=str(directory),
        load_profile=False,
        shutdown_atexit=False,
        delay=0,
        controller_args=[*_CONTROLLER_ARGS, *(["--ip=*"] if remote else [])],
        # Both start at the same time: engines wait for the controller's connection file, except on other
        # hosts, which may not see it and get its content instead.
        send_engines_connection_env=remote,
        config=settings,
        log=_silent(),
    )
    open_private(Path(cluster.cluster_file), "a").close()  # ipyparallel leaves its mode to the umask
    return cluster


def _silent() -> logging.Logger:
    """A logger without output: ipyparallel logs every start and stop to the notebook; we report what matters."""
    log = logging.getLogger("ring_notebook.cluster")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


_TASKS, _TASKS_PER_ENGINE = 24, 14  # processes and threads: of kernel, controller and supervisor, and of an engine


def require_processes(n: int) -> None:
    """Raise ClusterError where this container or user may not have the processes of a cluster of ``n`` engines."""
    needed, allowed = _TASKS + _TASKS_PER_ENGINE * n, processes_allowed()
    if needed > allowed:
        raise ClusterError(
            f"a cluster of {n} engines needs about {needed} processes and threads, {allowed} are allowed here; allow "
            "more (`docker run --pids-limit`, `ulimit -u`), or ask for fewer engines"
        )


_BASE, _PER_ENGINE = 128, 16  # the controller needs the most: about 100 for its ports, and 8 for each engine


def require_descriptors(n: int) -> None:
    """Let this process, and so its children, open the files that a cluster of ``n`` engines needs.

    Raises ClusterError when the hard limit is lower: libzmq ends its process when it cannot open a socket.
    """
    soft, hard = resource_limits(resource.RLIMIT_NOFILE)
    needed = _BASE + _PER_ENGINE * n
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ClusterError(
            f"a cluster of {n} engines needs {needed} file descriptors, this process may have {hard}; start Jupyter "
            f"after `ulimit -n {max(1024, needed)}`, or ask for fewer engines"
        )
    set_resource_limits(resource.RLIMIT_NOFILE, needed, hard)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
