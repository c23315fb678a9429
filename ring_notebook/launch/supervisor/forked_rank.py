"""A rank that a fork server starts: how a supervisor asks for one, and its substitute for a child process.

RING_FORK_SERVER names the socket of the server (`fork_server`). Without it, and for programs and environments that the
server cannot provide, ranks are started as children, each with an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.machine.os_calls import namespace, peer_of, resource_limits

ADDRESS = "RING_FORK_SERVER"
"""Environment: the server that forks the ranks of jobs, as @ and its name in Linux's abstract namespace."""

_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_"),
)
"""Prefixes of the variables that the interpreter, the loader and libraries read when they start."""
UNBUFFERED = "PYTHONUNBUFFERED"  # its effect can be had later
_NAMESPACES = ("mnt", "net", "pid", "user", "uts")
_LIMITS = tuple(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
_LOOK = 500  # milliseconds
NUMBER = struct.Struct("i")
"""The format of a process id, and of an exit code (after a signal, minus its number)."""


@dataclass(frozen=True)
class Request:
    """A rank to start. ``targets`` are its numbers for the descriptors that come with the request."""

    program: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    limits: dict[int, tuple[int, int]]
    targets: list[int]
    fixed: dict[str, str]
    """Must be equal in server and rank."""


class ForkedRank(subprocess.Popen[bytes]):
    """A rank that a server has forked. It is killed when this process dies, or drops the object.

    Its process id stays its own until `wait` has returned, though this process is not its parent.
    """

    def __init__(
        self, connection: socket.socket, program: Sequence[str], pid: int, outputs: Sequence[int | None]
    ) -> None:
        self._connection = connection
        self.args = list(program)
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None
        self.stdout, self.stderr = (None if fd is None else open(fd, "rb", -1) for fd in outputs)  # noqa: SIM115

    @classmethod
    def start(
        cls,
        program: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int | None, int | None, int | None],
        descriptors: Sequence[int],
        limits: Mapping[int, tuple[int, int]],
        waiting: Callable[[], None],
    ) -> ForkedRank | None:
        """Have the server of RING_FORK_SERVER start ``program``; None where there is none, or it must not.

        ``streams`` and ``descriptors`` are as for Popen; ``limits`` are the rank's limits that differ from ours.
        ``waiting`` is called twice a second until the server has imported its modules.
        """
        address = os.environ.get(ADDRESS)
        if not address or not _is_python(program, environment):
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes: list[tuple[int, int]] = []
        theirs: list[int] = []
        try:
            outputs: list[int | None] = []
            for fd, stream in enumerate(streams):
                if stream == subprocess.PIPE:
                    pipes.append(os.pipe())
                    theirs.append(pipes[-1][1])
                    outputs.append(pipes[-1][0])
                    continue
                theirs.append(os.open(os.devnull, os.O_RDWR) if stream == subprocess.DEVNULL else os.dup(stream or fd))
                outputs.append(None)
            request = Request(
                list(program),
                dict(environment),
                os.getcwd(),
                _umask(),
                {limit: resource_limits(limit) for limit in _LIMITS} | dict(limits),
                [0, 1, 2, *descriptors],
                fixed(environment),
            )
            connection.connect(socket_address(address))
            prove_same_user(connection)
            socket.send_fds(connection, [pickle.dumps(request)], [*theirs, *descriptors])
            answer = select.poll()
            answer.register(connection, select.POLLIN)
            while not answer.poll(_LOOK):
                waiting()
            pid = NUMBER.unpack(connection.recv(NUMBER.size))[0]
        except (OSError, struct.error):  # no server is there, or it cannot read this
            pid = 0
        finally:
            for fd in theirs:
                os.close(fd)
        if not pid:
            connection.close()
            for read, _ in pipes:
                os.close(read)
            return None
        return cls(connection, program, pid, outputs[1:])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = NUMBER.unpack(self._connection.recv(NUMBER.size))[0]
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            except (OSError, struct.error):  # the server was killed, and its ranks with it
                self.returncode = -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(1e-6)
        return None


def _is_python(program: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether ``program`` is this interpreter with a module, a text or a file to run, and no option but -u."""
    found = shutil.which(program[0], path=environment.get("PATH"))
    if found is None or os.path.dirname(os.path.abspath(found)) != os.path.dirname(sys.executable):
        return False
    if os.path.realpath(found) != os.path.realpath(sys.executable):
        return False
    rest = [argument for argument in program[1:3] if argument != "-u"]
    if not rest:
        return False
    if rest[0] in ("-c", "-m"):
        return len(program) > program.index(rest[0]) + 1
    return rest[0].endswith(".py") and os.path.isfile(rest[0])


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank must have in common with the server that forks it."""
    fixed = {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name != UNBUFFERED
    }
    return fixed | {name: namespace(name) for name in _NAMESPACES} | {"python": sys.executable}


def socket_address(address: str) -> str:
    """The address for a socket. It is no file: nothing of it stays behind."""
    return f"\0{address.removeprefix('@')}"


def answers(address: str) -> bool:
    """Whether a server listens at ``address``, though it may still import."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return connection.connect_ex(socket_address(address)) == 0


def prove_same_user(connection: socket.socket) -> None:
    """Raise PermissionError where another user is at the other end."""
    if peer_of(connection)[1:] != (os.getuid(), os.getgid()):
        raise PermissionError("the other end of the socket is another user's")


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    if "Umask:" in text:
        return int(text.partition("Umask:")[2].split()[0], 8)
    own = os.umask(0o077)  # no other thread may make a file meanwhile, so this comes second
    os.umask(own)
    return own
