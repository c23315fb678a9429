"""Supervises the engines of a notebook on this host: the others live when one dies, and it is started again on request.

``python -m ring_notebook.launch.supervisor.engine_supervisor N REQUESTS PROGRAM ARGS...``. REQUESTS is a named pipe in
a folder that only its owner can enter; `request` writes to it, from whatever notebook uses the engines now.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.hardware import oom_kills
from ring_notebook.launch.connections.connections import Connections, new_job_name
from ring_notebook.launch.supervisor.local_ranks import Assignment, LocalRanks, raise_file_limit
from ring_notebook.launch.supervisor.outer_job import without_outer_job
from ring_notebook.launch.supervisor.output_lines import carry
from ring_notebook.launch.supervisor.rank_failure import report_start_error
from ring_notebook.launch.supervisor.start_and_signal import end_children, send_signal
from ring_notebook.launch.supervisor.supervisor import Supervisor
from ring_notebook.rank import rendezvous
from ring_notebook.rank.rank_status import StatusFile
from ring_notebook.rank.rank_variables import STARTED_AGAIN, loopback
from ring_notebook.verdict import RankFailure, Rules

_REQUEST = re.compile(rb"(start|end) (\d{1,9})")
_CAPACITY = 1 << 12  # bytes


def make_requests(path: Path) -> None:
    """Make the pipe through which a supervisor that starts later takes requests."""
    os.mkfifo(path, 0o600)


def request(path: Path, what: Literal["start", "end"], rank: int) -> None:
    """Ask the supervisor of the pipe at ``path`` to start ``rank`` again, or to kill it if it runs.

    Raises OSError when no supervisor reads from it.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        os.write(pipe, f"{what} {rank}\n".encode())
    finally:
        os.close(pipe)


class EngineRanks(LocalRanks):
    """Ranks of this host that can be started again, one by one. ``also_check`` is called when they are checked."""

    also_check: Callable[[], object] = staticmethod(lambda: None)

    def check(self) -> None:
        super().check()
        self.also_check()

    def start(self, rank: int, channel: socket.socket) -> None:
        if not self._carries:
            super().start(rank, channel)
            return
        # One that has exited is started again: it cannot join the MPI of the others, and gets none.
        self._status_files[rank].close()
        self._status_files[rank] = StatusFile()
        self._oom_kills = oom_kills()
        found = rendezvous.variables(rank, self._assignment.size, channel.fileno())
        self._launch(rank, {STARTED_AGAIN: "1", **found}, subprocess.DEVNULL, [channel.fileno()])
        self._output = [output for output in self._output if output.is_alive()]
        self._output.append(carry(self._processes[rank]))

    def kill(self, rank: int) -> None:
        """Kill ``rank``, which runs, and its children."""
        send_signal(self._processes[rank], signal.SIGKILL)

    def _handle_exit(self, rank: int) -> None:
        group = self._processes[rank].pid
        self._groups.remove(group)
        super()._handle_exit(rank)
        end_children(group)


class EngineSupervisor(Supervisor):
    """``program`` on ``n`` engines, as many of which live as do; it ends when all have."""

    def __init__(self, program: list[str], n: int, requests: str) -> None:
        files = raise_file_limit()
        connections = Connections(new_job_name(), [0] * n)
        assignment = Assignment(program, without_outer_job(os.environ), list(range(n)), n, loopback())
        self._program = program
        self._engines = EngineRanks(assignment, connections.variables, files)
        self._wanted: set[int] = set()  # to be started again as soon as their processes have ended
        self._unread = b""
        super().__init__([self._engines], connections, Rules(n, engines=True))
        self._pipe = Path(requests)
        self._folder = KeptFolder(self._pipe.parent, self._pipe)
        self._listen()
        self._engines.also_check = self._keep_folder

    def _listen(self) -> None:
        # For writing too: so the pipe has a writer when all kernels have closed it, and never reads as closed.
        self._requests = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._selector.register(self._requests, selectors.EVENT_READ, self._read_requests)

    def _keep_folder(self) -> None:
        """Make the folder of the cluster again where it has been removed: a heal and other notebooks need it."""
        if not self._folder.look() or self._verdict.is_ending:
            return
        with suppress(OSError):  # it cannot be made, and the engines do without
            self._folder.restore()
            make_requests(self._pipe)  # last: who waits for it finds all else
            self._folder.watch()
            self._selector.unregister(self._requests)
            os.close(self._requests)
            self._listen()

    def _read_requests(self) -> None:
        with suppress(BlockingIOError):
            *lines, rest = (self._unread + os.read(self._requests, _CAPACITY)).split(b"\n")
            self._unread = rest[-_CAPACITY:]
            for line in lines:
                match = _REQUEST.fullmatch(line)
                if match and int(match[2]) < self._rules.n and not self._verdict.is_ending:
                    self._carry_out(match[1].decode(), int(match[2]))

    def _carry_out(self, what: str, rank: int) -> None:
        if what == "end":
            self._wanted.discard(rank)
            if rank in self._running:
                self._note("unwanted", rank)
        elif rank in self._running:
            self._wanted.add(rank)
        else:
            self._start_again(rank)

    def _look(self) -> None:
        super()._look()
        for rank in self._verdict.doomed & self._running:
            self._engines.kill(rank)

    def _start_again(self, rank: int) -> None:
        self._hang_up(rank)
        try:
            self._start(rank)
        except OSError as error:
            code = report_start_error(self._program, error)
            self._note("exited", self._engines.failure(rank, code))
            return
        self._running.add(rank)

    def _handle_exit(self, how: RankFailure) -> None:
        super()._handle_exit(how)
        if how.rank in self._wanted and not self._verdict.is_ending:
            self._wanted.discard(how.rank)
            self._start_again(how.rank)


def main() -> None:
    """Run the program of ``sys.argv`` and exit with the exit code of the job."""
    n, requests, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    try:
        supervisor = EngineSupervisor(program, n, requests)
    except OSError as error:
        sys.exit(report_start_error(program, error))
    sys.exit(supervisor.run())


_MOST_BYTES = 1 << 16  # of a file that is remembered: those by which processes find each other are small
_GROWING, _RECORDS = ".log", "spool"  # how the names of other files end, and a folder of them


class KeptFolder:
    """The folder of a cluster, made again when somebody has removed it under it, as `git clean` does.

    Remembers the small files of the folder at ``path``; ``last`` is the one by which it is known to be there."""

    def __init__(self, path: Path, last: Path) -> None:
        self._path = path
        self._last = last
        self._inode = last.stat().st_ino
        self._files: dict[Path, tuple[float, bytes]] = {}  # when each was written, and what it holds
        self._missing = False

    def look(self) -> bool:
        """Remember what there is. Returns whether the folder has gone, now and at the look before.

        It may be going just now, with a folder around it that is to go too.
        """
        try:
            there = self._last.stat().st_ino == self._inode
        except OSError:
            there = False
        if there:
            self._remember()
        before, self._missing = self._missing, not there
        return before and not there

    def _remember(self) -> None:
        before, self._files = self._files, {}
        for folder, names, files in os.walk(self._path):
            names[:] = [name for name in names if name != _RECORDS]
            for file in (Path(folder, name) for name in files if not name.endswith(_GROWING)):
                with suppress(OSError):  # it is being replaced
                    about = file.lstat()
                    known = before.get(file)
                    if known and known[0] == about.st_mtime:
                        self._files[file] = known
                    elif stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_BYTES:
                        self._files[file] = about.st_mtime, file.read_bytes()

    def restore(self) -> None:
        """Make the folder again, with what was remembered, and with what this process has written to its log.

        Raises OSError where the folder around the cluster's has gone too, which was removed on purpose.
        """
        os.stat(self._path.parents[2])
        make_private_folder(self._path / "log")
        for file, (_, content) in self._files.items():
            if not file.exists():
                make_private_folder(file.parent)
                with open_private(file, "wb") as written:
                    written.write(content)
        self._restore_log()

    def watch(self) -> None:
        """``last`` is there again, another file than before."""
        self._inode = self._last.stat().st_ino

    def _restore_log(self) -> None:
        name = os.readlink("/proc/self/fd/2")
        path = Path(name.removesuffix(" (deleted)"))
        if not name.endswith(" (deleted)") or not path.is_relative_to(self._path):
            return
        with open("/proc/self/fd/2", "rb") as before, open_private(path, "ab") as log:
            log.write(before.read())
            log.flush()
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)


if __name__ == "__main__":
    main()
