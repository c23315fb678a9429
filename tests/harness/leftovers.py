"""Finds what tests left behind: processes, shared memory, and ring memory and ports of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

__all__ = ["TOKEN", "Leftovers", "SharedProcesses", "own_shared_memory", "processes_with"]

# Every process that a test starts, directly or not, inherits this variable and is found by it.
TOKEN = "TEST_SESSION_TOKEN"
GRACE = 15.0
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_SHARED = "shared memory file"
_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


class Leftovers:
    """Remembers what exists now; `complaints` reports what is new and does not go away."""

    def __init__(self) -> None:
        self._token = os.environ.setdefault(TOKEN, uuid.uuid4().hex)
        self._before = {name: look() for name, look in self._looks().items()}
        # Another process may leave a file behind that it has mapped now; that file is not ours.
        self._before[_SHARED] |= _shared_memory()

    def complaints(self) -> list[str]:
        """One line for each new thing that is still there after 15 s."""
        deadline = time.monotonic() + GRACE
        found: dict[str, set[str]] = {}
        while True:
            now = {name: look() - self._before[name] for name, look in self._looks().items()}
            found = {name: found.get(name, things) & things for name, things in now.items()}
            if not any(found.values()) or time.monotonic() > deadline:
                return [f"{name} left behind: {thing}" for name, things in found.items() for thing in sorted(things)]
            gc.collect()  # only if needed: with torch loaded it takes a quarter of a second
            time.sleep(0.1)

    def _looks(self) -> dict[str, Callable[[], set[str]]]:
        return {
            "process": lambda: set(processes_with(TOKEN, self._token)),
            _SHARED: _unmapped_shared_memory,
            "ring memory (memfd)": _own_memfds,
            "listening port": _own_ports,
        }


class SharedProcesses:
    """Processes that several test files share: the `Leftovers` of one file do not count them.

    A context manager; none of them may be left at its end.
    """

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex

    def __enter__(self) -> SharedProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        assert not (complaints := self.complaints()), "\n".join(complaints)

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Processes that start in the block are shared, and so are their later children."""
        before = os.environ.get(TOKEN)
        os.environ[TOKEN] = self._token
        try:
            yield
        finally:
            del os.environ[TOKEN]
            if before is not None:
                os.environ[TOKEN] = before

    def complaints(self) -> list[str]:
        """One line for each process that still runs after 15 s."""
        deadline = time.monotonic() + GRACE
        while (found := processes_with(TOKEN, self._token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"process left behind: {process}" for process in found]


def own_shared_memory() -> None:
    """Give this process and its children a /dev/shm of their own, if it is root: others leave files there too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


def processes_with(variable: str, value: str) -> list[str]:
    """``"pid command line"`` of each living process, except this one, that inherited ``variable=value``."""
    wanted = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or wanted not in Path(f"/proc/{process.pid}/environ").read_bytes().split(
                b"\0"
            ):
                continue
            command = " ".join(" ".join(process.cmdline()).split())
            if process.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in _OF_PYTHON):
                found.append(f"{process.pid} {command}")
        except (OSError, psutil.Error):
            continue  # it ended while we looked
    return found


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


def _unmapped_shared_memory() -> set[str]:
    """Files and folders in /dev/shm that no living process has mapped: left by a dead one."""
    files = _shared_memory()
    for process in psutil.process_iter() if files else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        files = {path for path in files if path not in maps}
    return files


def _own_memfds() -> set[str]:
    return {f"descriptor {fd}: {target}" for fd, target in _descriptors() if target.startswith("/memfd:ring")}


def _own_ports() -> set[str]:
    listening = (c for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN)
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in listening}


def _descriptors() -> list[tuple[str, str]]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append((path.name, os.readlink(path)))
        except OSError:
            continue
    return links
