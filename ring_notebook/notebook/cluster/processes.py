"""The processes of a cluster, controller and engines: started, watched and ended together."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import ipyparallel

from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.files.private_files import open_private
from ring_notebook.launch.launchers.find_launcher import find_launcher
from ring_notebook.launch.launchers.hosts import Host, check_interface, is_local, master_of, only_here, place
from ring_notebook.launch.launchers.launcher import Launcher
from ring_notebook.launch.launchers.own_launchers import processes_allowed
from ring_notebook.launch.supervisor.engine_supervisor import Request, make_requests, request
from ring_notebook.launch.supervisor.inherited_variables import without_outer_job
from ring_notebook.launch.supervisor.local_ranks import SHARED_IMPORTS
from ring_notebook.launch.supervisor.parent_death import wrap
from ring_notebook.launch.supervisor.stderr_reports import split_reports
from ring_notebook.machine.os_calls import Wake, exit_descriptor, resource_limits, set_resource_limits
from ring_notebook.machine.own_python import module_command
from ring_notebook.machine.process_life import is_alive
from ring_notebook.notebook.cluster.death import Death, by_batch_system, explain, explain_failure, not_started, tail
from ring_notebook.notebook.cluster.death_watch import LostRanks
from ring_notebook.notebook.cluster.engine_forks import EngineForks, shared_imports
from ring_notebook.notebook.record.run_files import read_json, read_text
from ring_notebook.protocol.registration import port_warning
from ring_notebook.rank.rank_variables import MASTER
from ring_notebook.rank.rendezvous_server import is_loopback

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
_SECONDS_TO_LISTEN = 60.0  # for the controller, before engines of other hosts are started
_SECONDS_TO_END = ((signal.SIGTERM, 2.0), (signal.SIGKILL, 60.0))
_POLL = 0.02
_left: list[subprocess.Popen[bytes]] = []  # of clusters that live on: Popen warns if it is freed while its process runs


class Processes:
    """A controller and engines, and the directory that holds their connection files and logs.

    One thread starts, watches and ends them: the Linux kernel ends our children with the thread that started
    them, so this thread lives as long as they do. When one of them ends by itself, the thread ends the other one
    and sets ``death`` to the reason. The thread calls ``begin``, which starts both or takes over running ones.
    """

    def __init__(self, directory: Path, begin: Callable[[Processes], None], forks: EngineForks | None = None) -> None:
        self.death: Death | None = None
        self.pids: dict[str, int] = {}
        """The process ids of ``controller`` and ``engines``, which is their launcher; both run on this host."""
        self.lost: LostRanks | None = None
        """The engines that have died, where the others live on and `request` can start them again; else None."""
        self._directory = directory
        self._begin = begin
        self._forks = forks
        self._requests = directory / _REQUESTS
        self._exits: dict[str, int] = {}  # by name: a descriptor that becomes readable when the process exits
        self._children: list[subprocess.Popen[bytes]] = []
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
        if self._requests.exists():
            self.lost = LostRanks(self._log_of("engines"), directory / "log")

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
        """Start ``n`` engines, with ``lent`` variables; returns when they run, before they can be called.

        ``forks`` forks them, in place of a process of the supervisor, and is closed when they die. Raises
        MPIMissingError, and ClusterError for more than this host can start, before it starts anything.
        """
        requests, remote = directory / _REQUESTS, not only_here(hosts)
        try:
            launcher = find_launcher(requests=str(requests))
            launcher.command((), n, hosts)
            check_interface(config().interface, hosts)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        if launcher.starts_again:
            try:
                make_requests(requests)
            except OSError:  # a file system without named pipes: no engine is started again, and all end with one
                launcher = find_launcher()
        imports = " ".join([*([forks.address] if forks else []), *shared_imports()])

        def begin(made: Processes) -> None:
            controller = module_command("ring_notebook.notebook.cluster.controller", *_CONTROLLER_ARGS)
            made._start("controller", [*controller, *["--ip=*"] * remote], os.environ, keep)
            # Both start at the same time: engines wait for the controller's connection file, except on other
            # hosts, which may not see it and get its content instead.
            found = read_text(made._connection_file("engine", _SECONDS_TO_LISTEN)) if remote else ""
            own = {SHARED_IMPORTS: imports, **lent, **({"IPP_CONNECTION_INFO": found} if found else {})}
            made._start("engines", *engines(launcher, n, hosts, own), keep)

        return cls(directory, begin, forks)

    @classmethod
    def attach(cls, directory: Path, controller: int, launcher: int) -> Processes:
        """The processes with these ids, which another kernel started. Raises ClusterError when they have ended."""

        def begin(made: Processes) -> None:
            try:
                made._take("controller", controller)
                made._take("engines", launcher)
            except ProcessLookupError:
                raise ClusterError(f"the cluster in {directory} has ended") from None

        return cls(directory, begin)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str], keep: bool) -> None:
        """Start controller or engines; without ``keep`` it ends with the kernel."""
        own = {"IPP_CLUSTER_ID": self._directory.name, "IPP_PROFILE_DIR": str(self._directory)}
        with open_private(self._log_of(name), "ab") as log:
            child = subprocess.Popen(
                command if keep else wrap([*command]),
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        self._take(name, child.pid)

    def _take(self, name: str, pid: int) -> None:
        self._exits[name] = exit_descriptor(pid)
        self.pids[name] = pid

    def connect(self, timeout: float) -> Any:
        """An ipyparallel client. Raises ClusterError when the controller does not answer in time."""
        deadline = monotonic() + timeout
        try:
            file = self._connection_file("client", timeout)
            return ipyparallel.Client(str(file), timeout=max(1.0, deadline - monotonic()))
        except TimeoutError:
            raise ClusterError(
                f"the controller does not answer: {tail(self.log('controller')) or 'its log is empty'}"
            ) from None

    def _connection_file(self, kind: str, timeout: float) -> Path:
        """The file by which a ``kind``, client or engine, finds the controller. Raises TimeoutError without one."""
        file = self._directory / "security" / f"ipcontroller-{self._directory.name}-{kind}.json"
        deadline = monotonic() + timeout
        while not self.trouble() and is_alive(self.pids["controller"]) and monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):  # half written
                if read_json(file):
                    return file
            sleep(_POLL)
        raise TimeoutError

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
        """Send the supervisor a request. Raises ClusterError when there is none."""
        try:
            request(self._requests, what, number, name)
        except OSError as error:
            why = self.trouble() or f"the supervisor of the engines does not answer: {error}"
            raise ClusterError(why) from None

    def not_started(self, reason: str) -> str:
        """The message for a start that failed for this ``reason``, or because a process has ended."""
        message = not_started(self.death.reason if self.death else reason, self._output or self.log("engines"))
        return "\n".join(filter(None, [message, port_warning(self.log("controller"))]))

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
        return read_text(self._log_of(which))

    def _log_of(self, which: str) -> Path:
        return self._directory / "log" / f"{which}.log"

    def _live(self) -> None:
        try:
            self._begin(self)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        ended = self._wait() if self._error is None else ""
        output = self._output = self.log("engines")
        if self._asked == "leave":
            _left.extend(self._children)
        elif self._children or not self._error:  # after a failed attach these numbers may be of other processes
            self._end()
        for descriptor in self._exits.values():
            os.close(descriptor)
        if ended:
            if self._forks is not None:
                self._forks.close()
            lost = self.lost
            last = lost.last() if lost and ended == "engines" else None
            self.death = by_batch_system(last or explain(ended, output, self._directory / "log"))

    def _wait(self) -> str:
        """Wait until controller or engines end, and return which; empty when `stop` or `leave` is called."""
        watched = {self._wake.fileno(): "", **{descriptor: name for name, descriptor in self._exits.items()}}
        return watched[_ready(watched)[0]]

    def _end(self) -> None:
        """End the engines, then the controller, as far as they have been started."""
        for name, descriptor in reversed(self._exits.items()):
            for signum, seconds in _SECONDS_TO_END:
                if not _ready([descriptor], 0.0):
                    os.kill(self.pids[name], signum)
                if _ready([descriptor], seconds):
                    break
        for child in [*self._children, *_left]:
            child.poll()


def _ready(descriptors: Iterable[int], seconds: float | None = None) -> list[int]:
    """The descriptors that are readable within ``seconds``; None waits until one is."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def engines(
    launcher: Launcher, n: int, hosts: Sequence[Host], variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts ``n`` engines, and its environment, with these ``variables``."""
    # A nanny relays interrupts to an engine of another host, a process for each. Our supervisor does that too.
    nanny = not only_here(hosts) and not launcher.starts_again
    program = module_command("ring_notebook.engine.engine_program", *_ENGINE_ARGS, f"--IPEngine.enable_nanny={nanny}")
    # A kernel that a launcher has started as a rank: its engines are ranks of another job.
    environment = {**without_outer_job(os.environ), MASTER: master_of(hosts), **launcher.environment(), **variables}
    return launcher.command(launcher.supervised(program), n, hosts), environment


# Processes and threads: of kernel, controller and supervisor, of an engine, and for another host (ssh and its output).
_TASKS, _TASKS_PER_ENGINE, _TASKS_PER_HOST = 24, 14, 4


def require_processes(n: int, hosts: Sequence[Host]) -> None:
    """Raise ClusterError where this container or user may not have the processes of a cluster of ``n`` engines.

    Those of engines on other ``hosts`` do not count.
    """
    placed = place(n, hosts)
    # Places that an engine lends on this machine have addresses of loopback.
    here = sum(len(ranks) for name, ranks in placed.items() if is_local(name) or is_loopback(name))
    elsewhere = sum(not is_local(name) for name in placed)
    needed, allowed = _TASKS + _TASKS_PER_ENGINE * here + _TASKS_PER_HOST * elsewhere, processes_allowed()
    if needed > allowed:
        some = f", {here} of them on this host," if here < n else ""
        raise ClusterError(
            f"a cluster of {n} engines{some} needs about {needed} processes and threads, {allowed} are allowed here; "
            "allow more (`docker run --pids-limit`, `ulimit -u`), or ask for fewer engines"
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
