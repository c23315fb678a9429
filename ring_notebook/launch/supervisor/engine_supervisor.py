"""Supervises the engines of a notebook: the others live when one dies, and it is started again on request.

Requests come through a named pipe in a folder that only its owner can enter; `request` writes to it, from whatever
notebook uses the engines now.
"""

from __future__ import annotations

import os
import re
import selectors
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ring_notebook.files.private_files import make_private_folder, open_private
from ring_notebook.launch.connections.connections import Connections
from ring_notebook.launch.supervisor.supervisor import Hosts, Supervisor
from ring_notebook.verdict import RankFailure, Rules

Request = Literal["start", "end", "interrupt", "size", "slots"]
"""Start a rank again, or the first time; end one; interrupt a run on one; have so many ranks, or slots on a host."""
_REQUEST = re.compile(rb"(start|end|interrupt|size|slots) (\d{1,9})(?: (\S{1,255}))?")
_CAPACITY = 1 << 12  # bytes


def make_requests(path: Path) -> None:
    """Make the pipe through which a supervisor that starts later takes requests."""
    os.mkfifo(path, 0o600)


def request(path: Path, what: Request, number: int, name: str = "") -> None:
    """Ask the supervisor of the pipe at ``path`` for something: of a rank, or a number, by the ``name`` of host or run.

    Raises OSError when no supervisor reads from it.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        os.write(pipe, f"{what} {number} {name}".rstrip().encode() + b"\n")
    finally:
        os.close(pipe)


class EngineSupervisor(Supervisor):
    """``program`` on ``n`` engines, as many of which live as do; it ends when all have. ``requests`` is the pipe."""

    def __init__(self, hosts: Hosts, connections: Connections, n: int, program: list[str], requests: str) -> None:
        self._wanted: set[int] = set()  # to be started again as soon as their processes have ended
        self._unread = b""
        super().__init__(hosts, connections, Rules(n, engines=True), program)
        self._pipe = Path(requests)
        self._folder = KeptFolder(self._pipe.parent, self._pipe)
        self._listen()

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
                if (match := _REQUEST.fullmatch(line)) and not self._verdict.is_ending:
                    self._carry_out(match[1].decode(), int(match[2]), (match[3] or b"").decode(errors="replace"))

    def _carry_out(self, what: str, number: int, name: str) -> None:
        if what == "slots" and name:
            self._hosts.slots[name] = max(1, number)
        elif what == "size":
            self._resize(number)
        elif number >= self._connections.size:
            return
        elif what == "end":
            self._end(number)
        elif what == "interrupt":
            self._hosts.of(number).interrupt(number, name)
        elif number in self._running:
            self._wanted.add(number)
        else:
            self._assign(number, self._hosts.names([number]).get(number) or self._hosts.free(self._running))
            self._start_again(number)

    def _end(self, rank: int) -> None:
        self._wanted.discard(rank)
        if rank in self._running:
            self._note("unwanted", rank)

    def _resize(self, size: int) -> None:
        """The engines are ranks 0 to ``size`` - 1 from now on; those after them end, more are started one by one."""
        for rank in range(size, self._connections.size):
            self._end(rank)
        self._connections.resize(size)
        self._hosts.resize(size)

    def _look(self) -> None:
        super()._look()
        self._keep_folder()

    def _handle_exit(self, how: RankFailure) -> None:
        super()._handle_exit(how)
        if how.rank in self._wanted and not self._verdict.is_ending:
            self._wanted.discard(how.rank)
            self._start_again(how.rank)


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
