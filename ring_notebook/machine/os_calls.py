"""Calls of the system that some Python, kernel or sandbox lacks, each with its substitute.

A Python that was built against an old C library lacks names of calls that its kernel has: they are made by number. An
old kernel refuses calls with ENOSYS, a sandbox such as gVisor or a seccomp profile also with EPERM: then the substitute
is taken. No name is looked up to decide this: each call is tried.

`native/include/ring/memory/memory_file.hpp` has what the native core substitutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ring_notebook.machine.process_life import began, is_alive

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "loongarch64": 279, "ppc64le": 360, "s390x": 350}
_PIDFD_OPEN = 434  # on all these machines
_CLONE3 = 435
_CLOEXEC = 1  # MFD_CLOEXEC
_PRCTL = ({"x86_64": 157, "ppc64le": 171, "s390x": 172}.get(os.uname().machine, 167), 3)  # PR_GET_DUMPABLE
_HAPPENED = (errno.ESRCH, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a call that the kernel has, and lets this process make."""
_LEAST_NAMESPACE = 0xEFFFFFF0  # inode number of the first one of Linux, made when it starts
_PERIOD = 0.02  # seconds after which the substitute of pidfd_open looks again
_LEAST_ROOM = 16 << 20  # bytes that a folder must have free to replace unnamed memory
_CREDENTIALS = struct.Struct("3i")
_ESTABLISHED = "01"  # in /proc/net/tcp
_LONGEST_SOCKET = 107  # bytes of the path of a socket file


def exit_descriptor(pid: int) -> int:
    """A descriptor that polls as readable once process ``pid`` of this host has ended; the caller closes it.

    A child of ours counts as ended before it is waited for. The descriptor is a pidfd, or a pipe of a thread that looks
    at the process 50 times a second. Raises ProcessLookupError when there is no such process.
    """
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno in _HAPPENED:
            raise
    os.kill(pid, 0)
    since = began(pid) if Path(f"/proc/{pid}/stat").exists() else None
    read, write = os.pipe()
    threading.Thread(target=_tell_end, args=(pid, since, write), name="ring-exits", daemon=True).start()
    return read


def pidfd_open(pid: int) -> int:
    """The call itself, whatever this Python names. Raises OSError where it is refused."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("pidfd_open", _PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def memory_file(name: str) -> int:
    """A descriptor of an empty file that no folder names: memory that other processes can open through /proc.

    It is a memfd, or a file in a folder of `memory_folders`, unlinked at once. Raises OSError where neither can be had.
    """
    try:
        return memfd_create(name)
    except OSError as error:
        if error.errno in _HAPPENED:
            raise
        refused = error
    for folder in memory_folders():
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return os.dup(file.fileno())
    raise OSError(
        refused.errno,
        f"memfd_create is refused ({os.strerror(refused.errno or 0)}), and no folder can take its place; allow the "
        f"call, or make /tmp writable, with {_LEAST_ROOM >> 20} MiB free",
    )


def memfd_create(name: str) -> int:
    """The call itself, whatever this Python names. Raises OSError where it is refused."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"memfd_create has no name in this Python and no number on {os.uname().machine}")
    return _call("memfd_create", number, name.encode(), ctypes.c_uint(_CLOEXEC))


def memory_folders() -> list[str]:
    """Folders whose files may replace unnamed memory, the best first: the native core has the same order."""
    return list(filter(_has_room, ("/dev/shm", f"/run/user/{os.geteuid()}", "/tmp", "/var/tmp")))


def _has_room(folder: str) -> bool:
    with contextlib.suppress(OSError):
        about = os.statvfs(folder)
        return os.access(folder, os.W_OK | os.X_OK) and about.f_bavail * about.f_frsize >= _LEAST_ROOM
    return False


class Wake:
    """A pipe for loops that wait, which any thread or signal handler can make readable.

    `fileno` lets selectors and `select.poll` take the object itself.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """The descriptor that becomes readable; -1 once closed."""
        return self._read

    def set(self) -> None:
        """Make it readable."""
        with contextlib.suppress(BlockingIOError):  # it is, and the pipe is full
            os.write(self._write, b".")

    def clear(self) -> None:
        """Make it wait for the next `set`."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        for end in {self._read, self._write} - {-1}:
            os.close(end)
        self._read = self._write = -1


def processors(pid: int = 0) -> set[int]:
    """The processors that process ``pid``, 0 for this one, may use: its affinity, or all that are online."""
    try:
        return os.sched_getaffinity(pid)
    except (AttributeError, OSError):
        return set(range(os.cpu_count() or 1))


def resource_limits(kind: int) -> tuple[int, int]:
    """The soft and the hard limit of this process, `resource.RLIM_INFINITY` where the system does not tell."""
    try:
        return resource.getrlimit(kind)
    except OSError:
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


def set_resource_limits(kind: int, soft: int, hard: int) -> None:
    """Set both limits, where the system lets this process."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (soft, hard))


def namespace(kind: str) -> str:
    """The name of this process's namespace of this ``kind``; empty where the kernel does not tell.

    In gVisor each process reads another number there, which is less than any that Linux gives.
    """
    try:
        name = os.readlink(f"/proc/self/ns/{kind}")
        return name if int(name.partition("[")[2].rstrip("]")) >= _LEAST_NAMESPACE else ""
    except (OSError, ValueError):
        return ""


def number_in(path: str | Path) -> int | None:
    """The number in a file of /proc or /sys; None where there is no such file, or it holds another word."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def peer_of(channel: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a Unix socket. Raises OSError where the system does not tell."""
    data = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(data)
    return pid, user, group


@contextlib.contextmanager
def short_path(path: str | Path) -> Iterator[str]:
    """A short name for the socket file at ``path``, which must be absolute and may be long, valid in the block.

    Raises OSError where its folder is missing.
    """
    folder, name = os.path.split(path)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        yield str(path)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def user_at(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user whose process has opened a TCP connection on this host, by the addresses of its ends; None if unknown.

    The kernel lists connections and their users in /proc/net/tcp and tcp6, but none of other hosts or network
    namespaces. Closed ends belong to user 0 there, and are ignored. Raises OSError for a host that is no address.
    """
    wanted = [_address(*client), _address(*server)]
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, here, there, state, _, _, _, user, *_ = line.split()
                if [here, there] == wanted and state == _ESTABLISHED:
                    return int(user)
    return None


def _address(host: str, port: int) -> str:
    """An address as /proc/net/tcp writes it: 32 bits at a time in the order of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    data = socket.inet_pton(family, host.partition("%")[0])
    words = struct.unpack(f"={len(data) // 4}I", data)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


NO_PROC = "no /proc is mounted: ranks of a host open each other's memory there; `mount -t proc proc /proc`"


def has_proc() -> bool:
    """Whether processes are files of /proc, for which there is no substitute."""
    return os.path.exists("/proc/self/fd")


def substitutes() -> list[str]:
    """Tries each call that may be missing: a sentence for each that is refused, with what takes its place.

    Raises OSError, which names the call and what to do, where nothing can.
    """
    tries: tuple[tuple[str, Callable[[], object], str], ...] = (
        ("pidfd_open", lambda: os.close(pidfd_open(os.getpid())), "a thread looks at processes 50 times a second"),
        ("memfd_create", lambda: os.close(memfd_create("doctor")), "ranks share files without names in {folder}"),
        ("eventfd", lambda: os.close(os.eventfd(0)) if hasattr(os, "eventfd") else None, "pipes"),
        ("sched_getaffinity", lambda: os.sched_getaffinity(0), "all processors that are online count"),
        ("prlimit", lambda: resource.getrlimit(resource.RLIMIT_NOFILE), "limits of this process count as none"),
        ("prctl", lambda: _call("prctl", *_PRCTL), "processes look ten times a second whether a launcher lives"),
        ("flock", _try_lock, "two programs that write one file at a time do not wait for one another"),
    )
    found = []
    if not has_proc():
        raise OSError(errno.ENOENT, NO_PROC)
    for name, call, instead in tries:
        try:
            call()
        except OSError as error:
            if name == "memfd_create":
                os.close(memory_file("doctor"))
                instead = instead.format(folder=next(iter(memory_folders())))
            found.append(f"{name} is refused ({os.strerror(error.errno or 0)}): {instead}")
    if namespace("pid") == "":
        found.append("/proc/self/ns does not tell namespaces: ranks with one host name count as ranks of one host")
    return found


def clone3_is_refused() -> bool:
    """Whether a sandbox answers EPERM to clone3: then no thread starts, because the C library expects ENOSYS."""
    try:
        _call("clone3", _CLONE3, ctypes.c_void_p(None), ctypes.c_size_t(0))
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def _try_lock() -> None:
    with tempfile.TemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _call(name: str, number: int, *arguments: object) -> int:
    """Make a system call. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _tell_end(pid: int, since: int | None, write: int) -> None:
    """Make a pipe readable once ``pid`` has ended; ``since`` is when it began, if /proc tells."""
    poll = select.poll()
    poll.register(write, 0)  # only for its error: nobody has the read end any more
    while _runs(pid, since) and not poll.poll(1000 * _PERIOD):
        pass
    with contextlib.suppress(OSError):
        os.write(write, b".")  # closing is not enough: a fork may have it too
    os.close(write)


def _runs(pid: int, since: int | None) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    if since is not None:
        return is_alive(pid, since)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
