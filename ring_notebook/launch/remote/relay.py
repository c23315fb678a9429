"""Agents in places that Ray, Dask or Spark lends, which a supervisor reaches as it reaches hosts by ssh.

A place is a process of such an engine that runs `serve`, with the resources of one rank. It connects to the `Relay` of
the process that wants ranks. The remote shell that a supervisor starts (`main`) connects to the relay too, over a
socket file, with a host and a command. The relay has a place on that host run the command, and carries its streams.

Places connect over TLS. The engine carries the certificate of the relay to the places, and theirs back (`introduce`,
`Relay.admit`). They are no secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ring_notebook.errors import RingError
from ring_notebook.files.private_files import replace_text
from ring_notebook.launch.launchers.hosts import Host, is_local
from ring_notebook.machine.os_calls import short_path
from ring_notebook.machine.own_python import module_command
from ring_notebook.rank.rendezvous import this_host
from ring_notebook.rank.secure_streams import know, own_identity, tls_context
from ring_notebook.rank.serving import SECONDS_TO_PROVE, Serving
from ring_notebook.text.words import plural

_CAPACITY = 1 << 18
_SECONDS_TO_RETURN = 10.0  # for a place whose agent has ended
_SECONDS_TO_LOOK = 0.2
_SECONDS_TO_TELL = 1.0  # for the engine, why a place has ended; supervisors wait `time_limits.SECONDS_TO_HANG_UP`
_SECONDS_TO_NAME = 0.5  # between two looks which places are there
# An address of this machine that is none of its names: ranks there are to run in places too.
_LOOPBACK = "127.0.1.1"
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Where(NamedTuple):
    """How places find the relay; the engine carries it to them."""

    address: str
    port: int
    certificate: str


class Relay(Serving):
    """Waits at ``address``, which the places reach, and at a socket file in ``folder``, a private one.

    ``trouble`` says why a place ended before it was given back; any thread may call it.
    """

    def __init__(self, address: str, folder: Path, trouble: Callable[[], str] = str) -> None:
        self._trouble = trouble
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.where = Where(address, listener.getsockname()[1], own_identity().certificate)
        """What `serve` takes."""
        self._tls = tls_context(own_identity(), [], server=True)
        self._socket = str(folder / "relay")
        self._shells = socket.socket(socket.AF_UNIX)
        with short_path(self._socket) as name:
            self._shells.bind(name)
        self._shells.listen()
        self._names: dict[str, str] = {}  # of hosts, by what their processes have in common
        self._free: dict[str, list[_Place]] = {}  # by the name of the host, in the order in which they have come
        self._used: dict[str, int] = {}  # by the name of the host: places in which an agent runs
        self._hosts = folder / "hosts"
        self._named = ""  # what is in that file
        self._changed = asyncio.Condition()
        super().__init__("ring-relay", listener)

    @property
    def shell(self) -> str:
        """The remote shell (RING_REMOTE_SHELL) that reaches the places."""
        return shlex.join(module_command(__name__, self._socket))

    @property
    def discovery(self) -> str:
        """The script that names the hosts of all places to an elastic job, as they come and go."""
        return shlex.join(["cat", str(self._hosts)])

    def admit(self, certificate: str) -> None:
        """Take the place that has returned ``certificate`` from `introduce`, when it connects."""
        know(self._tls, certificate)

    def hosts(self) -> list[Host]:
        """The hosts with places that no agent uses, each with its number of them."""
        return [Host(name, len(places)) for name, places in list(self._free.items()) if places]

    def run(self) -> None:
        """Serve until `close`, which gives the places back: `serve` returns there, and agents that still run end."""
        super().run()
        self._shells.close()

    async def _serve(self) -> None:
        shells = await asyncio.start_unix_server(self._meet_shell, sock=self._shells)
        naming = asyncio.create_task(self._name_hosts())
        try:
            await super()._serve()
        finally:
            naming.cancel()
            shells.close()

    async def _name_hosts(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the disk is full: the file is as it was
                self._write_hosts()
            await asyncio.sleep(_SECONDS_TO_NAME)

    def _write_hosts(self) -> None:
        """Write the hosts, with their places that are still there, for `discovery`."""
        lines = []
        for host, places in self._free.items():
            for place in [one for one in places if one.reader.at_eof()]:
                places.remove(place)
                place.writer.close()
            if slots := len(places) + self._used.get(host, 0):
                lines.append(f"{host}:{slots}\n")
        if (text := "".join(lines)) != self._named:
            replace_text(self._hosts, text)
            self._named = text

    async def _answer(self, channel: socket.socket) -> None:
        """A place has connected."""
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            reader, writer = await self._streams(channel, self._tls)
            try:
                found = json.loads(await asyncio.wait_for(reader.readline(), SECONDS_TO_PROVE))
                name = self._names.setdefault(str(found["host"]), _name_of(writer))
                place = _Place(reader, writer, str(found["devices"]))
            except BaseException:
                writer.close()
                raise
            async with self._changed:
                self._free.setdefault(name, []).append(place)
                self._changed.notify_all()

    async def _meet_shell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.add(writer.transport)
        place = None
        with contextlib.suppress(OSError, EOFError, ValueError):
            asked = json.loads(await reader.readline())
            if not asked:
                try:
                    writer.write(f"{json.dumps(await asyncio.to_thread(self._trouble))}\n".encode())
                finally:  # whatever the engine raises
                    writer.close()
                return
            devices = self._devices(asked["host"])
            place = await self._take(asked["host"])
            answer = "" if place else f"no place is left on {asked['host']}"
            writer.write(f"{json.dumps(answer)}\n".encode())
            if place is not None:
                request = {"command": asked["command"], "devices": devices}
                place.writer.write(f"{json.dumps(request)}\n".encode())
                self._used[asked["host"]] = self._used.get(asked["host"], 0) + 1
                try:
                    await _carry_both((reader, place.writer), (place.reader, writer))
                finally:
                    self._used[asked["host"]] -= 1
        for one in (writer, *([place.writer] if place else [])):
            one.close()

    def _devices(self, host: str) -> str:
        """The GPUs of all places on ``host``: its agent divides them among the ranks."""
        named = [place.devices for place in self._free.get(host, []) if place.devices]
        return ",".join(dict.fromkeys(",".join(named).split(",")))

    async def _take(self, host: str) -> _Place | None:
        """A place on ``host`` that is still there, or comes back soon; None where there is none."""
        deadline = time.monotonic() + (_SECONDS_TO_RETURN if host in self._free else 0.0)
        async with self._changed:
            while (left := deadline - time.monotonic()) > 0:
                while free := self._free.get(host):
                    place = free.pop(0)
                    if not place.reader.at_eof():
                        return place
                    place.writer.close()
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        return None


class _Place(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    devices: str


def wait_for_places(
    relay: Relay, size: int, limit: float, trouble: Callable[[], str], engine: str, grows: bool = False
) -> list[Host]:
    """The hosts of ``size`` places, once these have connected; if more have and the job ``grows``, of all.

    Raises RingError when ``trouble`` says why no more will come, and after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while True:
        hosts = relay.hosts()
        come = sum(host.slots for host in hosts)
        if come == size or (come > size and grows):
            return hosts
        why = trouble() or (f"no more came within {limit:g} s" if time.monotonic() > deadline else "")
        if why:
            raise RingError(f"expected {plural(size, 'place')} of {engine}, got {come}: {why}")
        time.sleep(_SECONDS_TO_LOOK)


def introduce() -> str:
    """In a process of the engine, before `serve` there: what `Relay.admit` takes."""
    return own_identity().certificate


def serve(address: str, port: int, certificate: str) -> None:
    """In a process of the engine: run what the relay asks for, until that ends. The arguments are a `Where`.

    Raises RingError where another process has the address of the relay.
    """
    asyncio.run(_serve_relay(Where(address, port, certificate)))


async def _serve_relay(where: Where) -> None:
    about = {"host": this_host(), "devices": os.environ.get(_DEVICES, "")}
    tls = tls_context(own_identity(), [where.certificate], server=False)
    while True:
        try:
            reader, writer = await asyncio.open_connection(where.address, where.port, ssl=tls, server_hostname="")
        except ssl.SSLCertVerificationError as error:
            raise RingError(f"the process at {where.address}:{where.port} is not the relay of this place") from error
        except OSError:  # the relay has ended
            return
        try:
            writer.write(f"{json.dumps(about)}\n".encode())
            request = await reader.readline()
            if not request:
                return
            await _run(json.loads(request), reader, writer)
        except (OSError, EOFError):  # the relay has ended
            return
        finally:
            writer.close()


async def _run(request: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    devices = {_DEVICES: request["devices"]} if _DEVICES in os.environ else {}
    process = await asyncio.create_subprocess_shell(
        f"exec {request['command']}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **devices},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await _carry_both((reader, process.stdin), (process.stdout, writer))
    process.stdin.close()
    await process.wait()  # an agent whose stream has ended ends its ranks, then itself


async def _carry_both(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Carry bytes until one of the sources has ended."""
    tasks = [asyncio.ensure_future(_carry(*way)) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # one of them has gone
        while data := await source.read(_CAPACITY):
            sink.write(data)
            await sink.drain()


def _name_of(writer: asyncio.StreamWriter) -> str:
    address = str(writer.get_extra_info("peername")[0])
    return _LOOPBACK if is_local(address) else address


def main() -> None:
    """The remote shell: ``SOCKET HOST COMMAND...`` runs a command on a host, with the streams of this process.

    If the place ended before the supervisor wanted it to, standard error says why.
    """
    where, host, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as channel:
        if problem := _ask(channel, where, {"host": host, "command": " ".join(command)}):
            sys.exit(f"the relay of the ranks: {problem}")
        sending = threading.Thread(target=_send_input, args=(channel,), daemon=True)
        sending.start()
        with contextlib.suppress(OSError):  # the supervisor reads no more
            while data := channel.recv(_CAPACITY):
                while data:
                    data = data[os.write(1, data) :]
    os.close(1)
    deadline = time.monotonic() + _SECONDS_TO_TELL
    while sending.is_alive() and time.monotonic() < deadline:  # a supervisor that has ended the agent closes the input
        with socket.socket(socket.AF_UNIX) as channel:
            if why := _ask(channel, where, {}):
                os.write(2, why.encode())
                os._exit(1)
        sending.join(_SECONDS_TO_LOOK)
    os._exit(0)  # the thread may still wait for input


def _ask(channel: socket.socket, where: str, request: dict[str, str]) -> str:
    """The relay's answer to ``request``, or why there is none; empty if all is well."""
    try:
        with short_path(where) as name:
            channel.connect(name)
        channel.sendall(f"{json.dumps(request)}\n".encode())
        with channel.makefile("rb", buffering=0) as replies:
            return str(json.loads(replies.readline() or '"it has ended"'))
    except OSError as error:
        return str(error)


def _send_input(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, _CAPACITY):
            channel.sendall(data)
        channel.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
