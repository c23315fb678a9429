"""The socket through which agents reach a notebook: of this user alone, in a private folder. A connection is one call.

A caller sends a line of JSON, ``{"who": ..., "tool": ..., "arguments": {...}}``. It gets a line ``{"progress": text,
"share": number}`` about once a second, and at last the answer. A caller that hangs up ends its wait.
"""

from __future__ import annotations

import json
import os
import select
import socket
import socketserver
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.machine.os_calls import peer_of, short_path
from ring_notebook.machine.process_life import is_alive
from ring_notebook.notebook.bounded_server import BoundedServer
from ring_notebook.notebook.cluster.cluster_folders import own_folder
from ring_notebook.notebook.lab.handle import Progress
from ring_notebook.notebook.lab.tools import MOST_BYTES, ToolCalls

_SUFFIX = ".agents"
_SECONDS_TO_ASK = 10.0  # after which a caller that sends nothing is turned away


class ToolServer(BoundedServer, socketserver.UnixStreamServer):
    """Opens a notebook to agents of this user, whose calls ``tools`` answers, until `close`."""

    most, name = 8, "ring-agents"

    def __init__(self, tools: ToolCalls) -> None:
        self.tools = tools
        self.path = own_folder() / f"{os.getpid()}{_SUFFIX}"
        self.path.unlink(missing_ok=True)
        with short_path(self.path) as name:
            super().__init__(name, _Request)
        self.path.chmod(0o600)
        self.begin()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the operating system says that the caller is this user."""
        return peer_of(request)[1] == os.geteuid()

    def close(self) -> None:
        """Take no more calls; those in progress get their answers. Runs continue."""
        self.path.unlink(missing_ok=True)
        super().close()


class _Request(socketserver.StreamRequestHandler):
    server: ToolServer
    timeout = _SECONDS_TO_ASK

    def handle(self) -> None:
        asked = _object(self.rfile.readline(MOST_BYTES))
        who, tool, given = asked.get("who"), asked.get("tool"), asked.get("arguments")
        if not isinstance(who, str) or not isinstance(tool, str) or not isinstance(given, dict):
            self._say({"text": "no call: expected who, tool and arguments", "data": None, "error": True})
            return
        self._say(self.server.tools.call(who, tool, given, self._progress))

    def _progress(self, text: str, share: float | None) -> bool:
        """Tell the caller; false if it has hung up, which makes the connection readable."""
        if select.select([self.connection], [], [], 0)[0]:
            return False
        try:
            self._say({"progress": text, "share": share})
        except OSError:
            return False
        return True

    def _say(self, what: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; empty if there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def ask(who: str, tool: str, given: Mapping[str, Any], progress: Progress = lambda *_: True) -> dict[str, Any]:
    """The answer of the newest notebook of this folder that is open to agents, as of `ToolCalls.call`.

    Raises ClusterError if there is none, or it ends before it has answered.
    """
    for path in _sockets():
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                with short_path(path) as name:
                    connection.connect(name)
            except OSError:
                continue
            connection.sendall(json.dumps({"who": who, "tool": tool, "arguments": given}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                while found := _object(answers.readline(2 * MOST_BYTES)):
                    if "progress" not in found:
                        return found
                    if not progress(str(found["progress"]), found.get("share")):
                        raise RingError("the call was cancelled")
            raise ClusterError("the notebook has ended, or takes no more calls; `verdict` says what became of its runs")
    raise ClusterError(f"no notebook of {Path.cwd()} is open to agents; type `%ring share agents` in it")


def _sockets() -> Iterator[Path]:
    """The sockets of notebooks of this folder, newest first; those of processes that have ended are removed."""
    found: list[tuple[float, Path]] = []
    for path in own_folder().glob(f"*{_SUFFIX}"):
        with suppress(OSError, ValueError):
            if is_alive(int(path.stem)):
                found.append((path.stat().st_mtime, path))
            else:
                path.unlink()
    yield from (path for _, path in sorted(found, reverse=True))
