"""Forks ranks from a process that has imported what they need, and is their parent; a start takes milliseconds then.

The server imports modules and waits at a socket, which supervisors find in RING_FORK_SERVER. A rank that they ask for
becomes the program that it is to be, as if a fresh interpreter ran it: with its own arguments, environment, folder,
limits and descriptors, and the same exit. Variables that an interpreter and its libraries read at their start have to
be equal in server and rank; otherwise the server refuses the rank, and it is started as usual. The number of threads
may differ where torch is loaded, which takes another one. All ranks share two things with the server: the seed of
`hash`, and the addresses of libraries.

Modules that ranks may not need at once can wait (`later`): the server imports them in a thread while nobody asks for
ranks, and meanwhile still reports ranks that end. A rank forked before that imports them itself, on a core of its own;
on a host that is busy or has fewer cores, it waits for the server instead.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Thread
from types import ModuleType, TracebackType

from ring_notebook.config import config
from ring_notebook.launch.supervisor.forked_rank import (
    NUMBER,
    UNBUFFERED,
    Request,
    fixed,
    prove_same_user,
    socket_address,
)
from ring_notebook.launch.supervisor.parent_death import bind_to_parent, wrap
from ring_notebook.machine.hardware import cores
from ring_notebook.machine.os_calls import pidfd_open, resource_limits, set_resource_limits
from ring_notebook.machine.own_python import module_command
from ring_notebook.rank.rank_threads import OMP

_ROOM = 16 << 10
"""Bytes that a server keeps free in its command line and environment, which `ps` and others read there."""
_LONGEST = 1 << 20
_LOOK = 0.01  # seconds between looks at ranks, where the system does not report their ends
_QUIET = 10.0  # seconds after a fork, in which its job may ask for more, and ranks import what they need
_LATER = "+"
_SET_OPENBLAS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
)


def later(module: str) -> str:
    """The name of a module that can wait, among the ``modules`` of `start_server`."""
    return f"{_LATER}{module}"


def start_server(
    address: str, modules: Sequence[str], environment: Mapping[str, str], apart: bool = False
) -> subprocess.Popen[bytes]:
    """Start a server that imports ``modules`` and ends with this thread. Supervisors find it by `ADDRESS`.

    Jobs may be started at once: their ranks wait until it is ready. Modules that are not installed are left out; when
    one raises anything else, the server ends and ranks are started as usual. A server that is ``apart`` gets no signals
    of this process's group, and prints nothing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(socket_address(address))
        listener.listen(128)
        command = module_command(__spec__.name, str(listener.fileno()), *modules, " " * _ROOM)
        return subprocess.Popen(
            wrap(command),
            env={**environment, "RING_FORK_SERVER_ROOM": " " * _ROOM},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if apart else None,
            stderr=subprocess.DEVNULL if apart else None,
            pass_fds=[listener.fileno()],
            start_new_session=apart,
        )


def main() -> None:
    """Entry point: serve. In a rank it returns with the program to run in place of this one."""
    listener, *modules = (argument for argument in sys.argv[1:] if argument.strip())
    gc.disable()  # until a rank begins; a fifth of an import's time
    can_wait = [name.removeprefix(_LATER) for name in modules if name.startswith(_LATER)]
    server = _Server(socket.socket(fileno=int(listener)), can_wait)
    for name in modules:
        if not name.startswith(_LATER):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
    gc.freeze()  # a collection in a rank leaves the pages alone that it shares with the server
    program = server.serve()
    _strip_tracebacks()
    program()


@dataclass
class _Rank:
    pid: int
    pidfd: int  # -1 where the system has none
    connection: socket.socket
    ended: bool = False


class _Server:
    """The loop. It reaps a rank only when its supervisor knows how it ended."""

    def __init__(self, listener: socket.socket, can_wait: Sequence[str] = ()) -> None:
        self._fixed = fixed(os.environ)
        self._can_wait = can_wait  # modules that have not been imported
        self._quiet_at = 0.0
        self._importer: Thread | None = None
        self._ending = False
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._ranks: dict[int, _Rank] = {}
        self._program: Callable[[], None] | None = None
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def serve(self) -> Callable[[], None]:
        """Fork ranks for as long as this process lives. Returns in each of them."""
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        while self._program is None:
            unwatched = [rank for rank in self._ranks.values() if rank.pidfd < 0 and not rank.ended]
            quiet_in = max(0.0, self._quiet_at - time.monotonic()) if self._can_wait else None
            events = self._selector.select(_LOOK if unwatched else quiet_in)
            for key, _ in events:
                key.data()
                if self._program is not None:
                    break
            else:
                for rank in unwatched:
                    if os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                        self._report_end(rank)
            if self._can_wait and not events and time.monotonic() >= self._quiet_at:
                self._begin_imports()
        return self._program

    def _begin_imports(self) -> None:
        """Import in a thread the modules that can wait."""
        names, self._can_wait = self._can_wait, ()

        def run() -> None:
            for name in names:
                with contextlib.suppress(Exception):  # a rank that needs it raises that again
                    importlib.import_module(name)

        importer = Thread(target=run, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: ranks import it themselves
            importer.start()
            self._importer = importer

    def _end_imports(self, ranks: int) -> None:
        """Wait for the thread that imports, since it must not run in a fork; a host full of ``ranks`` imports first."""
        if self._can_wait and (ranks > cores() or os.getloadavg()[0] > (os.cpu_count() or 1)):
            self._begin_imports()
        if self._importer is not None:
            self._importer.join()
            self._importer = None
            gc.freeze()
        self._quiet_at = time.monotonic() + _QUIET

    def _end(self) -> None:
        """The process that has started this one has died. Supervisors may be ending ranks now, which are its forks."""
        self._ending = True
        if not self._ranks:
            os._exit(0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left but the one that is kept for this
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
            return
        received: list[int] = []
        try:
            prove_same_user(connection)
            data, received, *_ = socket.recv_fds(connection, _LONGEST, 253)
            request: Request = pickle.loads(data)
            if len(received) < len(request.targets) or not self._can_be(request):
                raise PermissionError("too few descriptors here, or another environment")
            self._end_imports(int(request.environment.get("LOCAL_WORLD_SIZE") or 1))
            server, pid = os.getpid(), os.fork()
        except Exception:  # after a bad request, or if no process can be started, running ranks live on
            connection.close()
            for fd in received:
                os.close(fd)
            return
        if pid == 0:
            self._become_rank(server, request, received, connection)
            return
        for fd in received:
            os.close(fd)
        rank = self._ranks[pid] = _Rank(pid, -1, connection)
        with contextlib.suppress(OSError):  # not `exit_descriptor`: a process that forks must have no thread
            rank.pidfd = pidfd_open(pid)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._report_end(rank))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._forget(rank))
        with contextlib.suppress(OSError):
            connection.send(NUMBER.pack(pid))

    def _can_be(self, request: Request) -> bool:
        """Whether a fork of this process can become what is asked for."""
        ours, theirs = self._fixed, request.fixed
        if "torch" in sys.modules:
            ours, theirs = ({**one, OMP: ""} for one in (ours, theirs))
        return ours == theirs

    def _report_end(self, rank: _Rank) -> None:
        if rank.ended:  # its supervisor has gone at the same moment
            return
        self._unwatch(rank)
        ended = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        with contextlib.suppress(OSError):
            rank.connection.send(NUMBER.pack(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))

    def _unwatch(self, rank: _Rank) -> None:
        rank.ended = True
        if rank.pidfd >= 0:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)

    def _forget(self, rank: _Rank) -> None:
        """Its supervisor has gone, or knows how it ended."""
        self._selector.unregister(rank.connection)
        rank.connection.close()
        if not rank.ended:
            self._unwatch(rank)
            os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        del self._ranks[rank.pid]
        if self._ending and not self._ranks:
            os._exit(0)

    def _become_rank(self, server: int, request: Request, received: list[int], connection: socket.socket) -> None:
        bind_to_parent(server, signal.SIGKILL)
        os.setpgid(0, 0)
        self._selector.close()
        for opened in (self._listener, connection, *(rank.connection for rank in self._ranks.values())):
            opened.close()
        _take_descriptors(received, request.targets)
        self._program = _make_program(request)
        self._ranks.clear()


def _take_descriptors(received: Sequence[int], targets: Sequence[int]) -> None:
    """Move the received descriptors to the rank's numbers, and close all others."""
    _, hard = resource_limits(resource.RLIMIT_NOFILE)
    set_resource_limits(resource.RLIMIT_NOFILE, hard, hard)  # for now: the supervisor may have more
    above = max(targets) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    os.closerange(0, above)
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target)
    os.closerange(above, 1 << 16)


def _make_program(request: Request) -> Callable[[], None]:
    """Make this process what a fresh interpreter would be; what it then runs."""
    for limit, (soft, hard) in request.limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (soft, hard))
    os.umask(request.umask)
    os.chdir(request.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threads_before = os.environ.get(OMP)
    os.environ.clear()
    os.environ.update(request.environment)
    _show(request.program, request.environment)
    time.tzset()
    tempfile.tempdir = None
    config.cache_clear()
    _reopen_streams(bool(os.environ.get(UNBUFFERED)))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if (threads := os.environ.get(OMP, "")) != threads_before and threads.isdigit():
        _compute_with(int(threads))
    gc.enable()
    sys.orig_argv[:] = request.program
    return _read_program(request.program[1:])


def _compute_with(threads: int) -> None:
    """Set the threads of libraries that have already read OMP_NUM_THREADS: torch, and numpy's OpenBLAS."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    mapped = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {path for path in mapped if "openblas" in Path(path).name}:
        library = ctypes.CDLL(path)
        for name in _SET_OPENBLAS:
            if (set_threads := getattr(library, name, None)) is not None:
                set_threads(threads)
                break


def _read_program(arguments: list[str]) -> Callable[[], None]:
    """What `python ARGUMENTS` runs, in a new ``__main__``."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        return lambda: exec(compile(arguments[1], "<string>", "exec"), vars(module))
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        return lambda: vars(runpy)["_run_module_as_main"](arguments[1])  # as the interpreter itself does
    path = os.path.abspath(arguments[0])
    sys.argv[:] = arguments
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    return lambda: exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


def _reopen_streams(unbuffered: bool) -> None:
    """Standard streams over the new descriptors, as an interpreter makes them."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "rb" if fd == 0 else "wb"
        binary = open(fd, mode, 0 if unbuffered and fd else -1, closefd=False)  # noqa: SIM115
        old = getattr(sys, f"__{name}__")
        stream = io.TextIOWrapper(
            binary,
            old.encoding,
            old.errors,
            line_buffering=not unbuffered and (fd == 2 or os.isatty(fd)),
            write_through=unbuffered,
        )
        vars(stream)["mode"] = mode[0]
        vars(getattr(binary, "raw", binary))["name"] = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show the rank's command line and environment in /proc, as far as the server's leave room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, env_begin, env_end = map(int, fields[45:49] or 4 * ["0"])
    if not 0 < begin < end or not 0 < env_begin < env_end:  # gVisor does not tell
        return
    shown = ("\0".join(program), "\0".join(f"{name}={value}" for name, value in environment.items()))
    for text, first, last in zip(shown, (begin, env_begin), (end, env_end), strict=True):
        data = text.encode(errors="surrogateescape")[: last - first - 1]
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, data, len(data))


def _strip_tracebacks() -> None:
    """Show an uncaught exception without the frames of this file, which are below the program's."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown = traceback
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == __file__:
                shown = traceback.tb_next
            traceback = traceback.tb_next
        show(kind, error.with_traceback(shown), shown)

    sys.excepthook = hook


if __name__ == "__main__":
    main()
