"""The ranks of one host, for a supervisor: an interface, and its form for this host."""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.launch.supervisor.fork_server import start_server
from ring_notebook.launch.supervisor.forked_rank import ADDRESS, answers
from ring_notebook.launch.supervisor.inherited_variables import with_variables_of_job
from ring_notebook.launch.supervisor.start_and_signal import (
    end_children,
    end_if_late,
    has_members,
    send_signal,
    start_rank,
)
from ring_notebook.launch.supervisor.stderr_reports import MemoryKills, failure_of
from ring_notebook.launch.supervisor.tagged_output import Carrier, carry
from ring_notebook.machine.gpus import gpus, gpus_of_script
from ring_notebook.machine.os_calls import exit_descriptor, resource_limits, set_resource_limits
from ring_notebook.rank.named_interrupt import interrupt
from ring_notebook.rank.rank_status import RankStatus, StatusFile
from ring_notebook.rank.rank_threads import thread_variables
from ring_notebook.rank.rank_variables import rank_variables

SHARED_IMPORTS = "RING_SHARED_IMPORTS"
"""Environment of a job: the modules that one process of each host imports; all ranks there are its forks. Importing
PyTorch costs a rank 2 s of processor time and 160 MB. Before them may stand the address of a process that has imported
them already."""

_SECONDS_TO_REAP = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the ranks of one host have to run.

    ``environment`` is that of the job; each rank gets its own variables besides. ``master`` is what `rank_variables`
    takes. ``min_np`` is not 0 in an elastic job. ``tagged``: printed lines carry their rank. ``engines`` are ended with
    all their children, because others live on. ``given`` names variables that count also where a host has its own.
    """

    program: list[str]
    environment: dict[str, str]
    ranks: list[int]
    size: int
    master: str
    min_np: int = 0
    tagged: bool = False
    engines: bool = False
    given: tuple[str, ...] = ()


def nothing() -> None:
    """Do nothing."""


class HostRanks(ABC):
    """The ranks of one host. ``watch`` comes first, then one ``start`` for each rank, then ``carry_output``.

    After that a rank that has exited may be started again, and others that `assign` adds.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host, by local rank."""
        return self._assignment.ranks

    def assign(self, ranks: Sequence[int], size: int) -> None:
        """The host has ``ranks`` of a job of ``size`` from now on, some of which are yet to be started."""
        self._assignment = replace(self._assignment, ranks=list(ranks), size=size)

    def watch(
        self,
        selector: selectors.BaseSelector,
        on_exit: Callable[[RankFailure], None],
        while_starting: Callable[[], None] = nothing,
    ) -> None:
        """Register the events of this host with ``selector``, whose keys carry functions to call.

        ``on_exit`` takes how a rank has exited; with code 0 it has ended well, as far as is known. ``while_starting``
        is called after each rank is started, and while one takes long: nothing else happens then.
        """
        self._selector = selector
        self._on_exit = on_exit
        self._while_starting = while_starting

    @abstractmethod
    def start(self, rank: int, channel: socket.socket, formation: int = 0) -> None:
        """Start the program as ``rank``, with its end of the socket between rank and supervisor.

        A process that joins running ranks gets the number of their next ``formation``, from 1, and no MPI, because it
        cannot join theirs. Raises NoProgramError when the program is the reason, OSError else.
        """

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Called at least twice a second while ranks run."""

    def speak(self) -> None:  # noqa: B027 - this host needs none
        """Give another host a sign of life when it is time."""

    @abstractmethod
    def carry_output(self) -> None:
        """Pass on what ranks print; all have been started."""

    @abstractmethod
    def send(self, signum: int) -> None:
        """Send a signal to all ranks that still run."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """Kill ``rank``, if it runs, and its children."""

    @abstractmethod
    def interrupt(self, rank: int, name: str) -> None:
        """Send SIGINT to ``rank``, if it still executes ``name``, and to none of its children."""

    @abstractmethod
    def status(self, rank: int) -> RankStatus:
        """What ``rank`` has reported so far."""

    @abstractmethod
    def operations(self, rank: int) -> bytes:
        """The log of the last operations of ``rank``, which has exited; empty where it is lost."""

    @abstractmethod
    def failure(self, rank: int, code: int) -> RankFailure:
        """The failure of ``rank``, which has exited with ``code``, or aborts the job with it now."""

    @abstractmethod
    def end_children(self) -> None:
        """End the processes that ranks left behind; all ranks have exited, some by force."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all output of the ranks is written; all have exited."""


def raise_file_limit() -> tuple[int, int]:
    """Let this process have as many open files as it may, several per rank. Returns the limits it had."""
    soft, hard = resource_limits(resource.RLIMIT_NOFILE)
    set_resource_limits(resource.RLIMIT_NOFILE, hard, hard)
    return soft, hard


class LocalRanks(HostRanks):
    """The ranks of this host, with their environment, status and output.

    ``variables`` makes the variables with which a rank finds the others through its socket; ``files`` are its limits.
    """

    def __init__(
        self,
        assignment: Assignment,
        variables: Callable[[int, int, socket.socket, int], dict[str, str]],
        files: tuple[int, int],
        carrier: Callable[[subprocess.Popen[bytes], int | None], Carrier] = carry,
        stdin: int | None = None,
    ) -> None:
        super().__init__(assignment)
        self._variables = variables
        self._files = files
        self._carrier = carrier
        self._stdin = stdin  # of rank 0; None: this process's
        self._memory_kills = MemoryKills()
        self._gpus = gpus()
        self._status_files: dict[int, StatusFile] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, int] = {}  # descriptors
        self._groups: list[int] = []
        self._late: set[int] = set()  # ranks that have failed and are being ended while they wait for others
        self._carries = False  # what the ranks print
        self._output: list[Carrier] = []
        self._forks = self._share_imports()

    def _share_imports(self) -> subprocess.Popen[bytes] | None:
        """Have the ranks forked from one process that imports what the job's SHARED_IMPORTS names.

        Not where there are GPUs: what CUDA does in forks of a process that has its libraries has not been tried. Not
        over several hosts, where it has not been tried either.
        """
        modules = self._assignment.environment.get(SHARED_IMPORTS, "").split()
        if modules and modules[0].startswith("@"):
            if answers(modules[0]):
                os.environ[ADDRESS] = modules[0]
                return None
            del modules[0]
        if not modules or len(self.ranks) < max(2, self._assignment.size) or self._gpus or ADDRESS in os.environ:
            return None
        address = f"@ring-{secrets.token_hex(16)}"
        server = start_server(address, modules, self._environment(self.ranks[0], {}))
        os.environ[ADDRESS] = address
        return server

    def start(self, rank: int, channel: socket.socket, formation: int = 0) -> None:
        if formation:
            self._carries = True  # all ranks that the host began with have been started
            self._memory_kills = MemoryKills()
        if before := self._status_files.get(rank):
            before.close()
        self._status_files[rank] = StatusFile()
        stdin = self._stdin if rank == 0 and not formation else subprocess.DEVNULL
        environment = self._environment(rank, self._variables(self._assignment.size, rank, channel, formation))
        self._processes[rank] = start_rank(
            self._assignment.program,
            environment,
            stdin,
            [channel.fileno()],
            files=self._files,
            waiting=self._while_starting,
        )
        self._while_starting()
        self._groups.append(self._processes[rank].pid)
        if self._carries:
            self._carry_output_of(rank)

    def _carry_output_of(self, rank: int) -> None:
        tag = rank if self._assignment.tagged else None
        self._output = [output for output in self._output if output.is_alive()]
        self._output.append(self._carrier(self._processes[rank], tag))
        self._exits[rank] = exit_descriptor(self._processes[rank].pid)
        self._selector.register(self._exits[rank], selectors.EVENT_READ, lambda: self._handle_exit(rank))

    def check(self) -> None:
        self._memory_kills.look()
        for rank, process in self._processes.items():
            if end_if_late(process, self.status(rank)):
                self._late.add(rank)
        # A free process number may be given to a group of somebody else.
        running = {process.pid for process in self._processes.values()}
        self._groups = [group for group in self._groups if group in running or has_members(group)]

    def carry_output(self) -> None:
        # Threads only now: what Popen runs between fork and exec may need a lock that one of them holds.
        self._carries = True
        for rank in self._processes:  # one that has exited already has printed too
            self._carry_output_of(rank)

    def send(self, signum: int) -> None:
        for process in self._processes.values():
            send_signal(process, signum)

    def kill(self, rank: int) -> None:
        if process := self._processes.get(rank):
            send_signal(process, signal.SIGKILL)

    def interrupt(self, rank: int, name: str) -> None:
        if (process := self._processes.get(rank)) and process.returncode is None:
            with suppress(ProcessLookupError):
                interrupt(process.pid, self._status_files[rank].path, name)

    def status(self, rank: int) -> RankStatus:
        file = self._status_files.get(rank)
        return file.read() if file else RankStatus()

    def operations(self, rank: int) -> bytes:
        file = self._status_files.get(rank)
        return file.operations() if file else b""

    def failure(self, rank: int, code: int) -> RankFailure:
        return failure_of(rank, code, self.status(rank), self._memory_kills)

    def end_children(self) -> None:
        for group in self._groups:  # the program behind a shell script is a child of it
            end_children(group)

    def close(self) -> None:
        for output in self._output:
            output.join()
        if self._forks is not None:
            self._forks.kill()
            self._forks.wait()

    def _handle_exit(self, rank: int) -> None:
        # A dead process's descriptor stays readable: left in the selector, no select would wait any more.
        self._selector.unregister(self._exits[rank])
        os.close(self._exits.pop(rank))
        process = self._processes.pop(rank)
        code = _exit_code(process)
        if rank in self._late:
            self._late.discard(rank)
            code = self.status(rank).code
        if self._assignment.engines:
            self._groups.remove(process.pid)
            end_children(process.pid)
        self._on_exit(self.failure(rank, code))

    def _environment(self, rank: int, variables: dict[str, str]) -> dict[str, str]:
        job = self._assignment
        own = {name: value for name, value in job.environment.items() if name != SHARED_IMPORTS}
        # Unbuffered, as under MPI, so that output comes when it is printed.
        defaults = {"PYTHONUNBUFFERED": "1", **variables}
        added = {name: value for name, value in defaults.items() if name not in own}
        local_rank = self.ranks.index(rank)
        added |= rank_variables(rank, job.size, local_rank, len(self.ranks), job.master)
        added |= gpus_of_script(local_rank, self._gpus) | thread_variables(len(self.ranks), own)
        return {
            **with_variables_of_job(own, added),
            **(self._status_files[rank].variables if rank in self._status_files else {}),
            **({"RING_MIN_NP": str(job.min_np)} if job.min_np else {}),
        }


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """How a process has exited. Linux tells a tracer first, which may never ask."""
    try:
        return process.wait(_SECONDS_TO_REAP)
    except subprocess.TimeoutExpired:
        process.returncode = os.waitstatus_to_exitcode(int(Path(f"/proc/{process.pid}/stat").read_text().split()[-1]))
        return process.returncode
