"""A second user of this machine, and what others can see of our processes: ports, process ids, sockets, folders."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.waiting import LIMIT

__all__ = ["Exposed", "Stranger", "stranger"]

# Bytes that a ZeroMQ socket says to anybody: that it is one, and then, to one who is too, that it demands CURVE.
SIGNATURE, GREETING = 12, 64


class Exposed:
    """What is open of the processes that this one has started, or ``only`` of some, and ``folders``."""

    def __init__(self, *folders: Path, only: Sequence[int] = ()) -> None:
        self.folders = folders
        # Not this process, whose ports are its own, nor the stranger, who is not its user any more.
        children = psutil.Process().children(recursive=True)
        self.processes = list(only) or [child.pid for child in children if _is_ours(child)]
        self.listeners: set[tuple[str, int]] = set()
        inodes = set()
        for pid in self.processes:
            with contextlib.suppress(psutil.Error, OSError):
                connections = psutil.Process(pid).net_connections(kind="inet")
                self.listeners |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
                inodes |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        self.abstract = {name for name, inode in _abstract_sockets() if f"socket:[{inode}]" in inodes}

    def target(self) -> dict[str, Any]:
        """All of it, as the stranger takes it."""
        return {
            "ports": sorted(self.listeners),
            "pids": self.processes,
            "folders": list(map(str, self.folders)),
            "abstract": sorted(self.abstract),
        }


class Stranger:
    """The second user: attacks what it is shown."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def attack(self, exposed: Exposed) -> dict[str, str]:
        """What it could read, write or end, by how it did; the greeting of a port that demands CURVE is nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(exposed.target()) + "\n")
        self._process.stdin.flush()
        got: dict[str, str] = json.loads(self._process.stdout.readline())
        return {how: what for how, what in got.items() if not _is_greeting(what)}


@contextlib.contextmanager
def stranger() -> Iterator[Stranger]:
    """A process that becomes user "nobody" and attacks; needs root."""
    program = Path(__file__).with_name("stranger.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-I", str(program)], text=True, cwd="/", env={}, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "it has become the other user"
        yield Stranger(process)
        process.stdin.close()
        assert process.wait(LIMIT) == 0


def _is_greeting(what: str) -> bool:
    return what.startswith("\xff") and (len(what) <= SIGNATURE or (len(what) <= GREETING and "CURVE\0" in what))


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.uids().real == os.getuid()
    except psutil.NoSuchProcess:
        return False


def _abstract_sockets() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, _, _, _, inode, *name = line.split(maxsplit=7)
        if name and name[0].startswith("@"):
            yield name[0][1:], inode
