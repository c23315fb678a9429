"""Records the TCP streams between hosts that are network namespaces (`recorded`), and replays them.

As a program, ``sniffer.py record FILE`` records all interfaces of its namespace until its input ends, and
``sniffer.py replay FILE ADDRESS...`` sends the recording to each address, and prints the answers.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Answer", "Flow", "Listener", "Recording", "listeners", "recorded"]

_ALL = 3  # protocols of Ethernet
_IPV4, _IPV6, _TCP = b"\x08\x00", b"\x86\xdd", 6
_BUFFER = 1 << 27
_LONGEST = 1 << 24  # bytes kept of a stream


class Flow(NamedTuple):
    """One direction of a connection: address and port of its source, and of its destination."""

    source: str
    port: int
    to: str
    to_port: int


class Answer(NamedTuple):
    """What a port answers to a replay."""

    connections: int
    heard: bytes


class Recording:
    """A recording, complete when the block of `recorded` has ended."""

    def __init__(self) -> None:
        self.flows: dict[Flow, bytes] = {}

    def holding(self, secret: bytes) -> list[Flow]:
        """The streams in which ``secret`` can be read."""
        return [flow for flow, data in self.flows.items() if secret in data]

    def replayed(
        self, space: str, own: str, without: Sequence[str] = (), ports: Collection[int] | None = None
    ) -> Answer:
        """Send all of it from the namespace ``own`` to each port that listens in ``space`` beyond loopback.

        Ports of ssh servers and of programs ``without`` are left out; with ``ports`` only these ports are tried.
        """
        all_there = listeners(space)
        left_out = {one.port for one in all_there if one.program.startswith(("sshd", *without))}
        found = {
            f"{self._address(space) if one.address in ('0.0.0.0', '*') else one.address}:{one.port}"
            for one in all_there
            if one.port not in left_out and (ports is None or one.port in ports)
        }
        targets = sorted(found)
        with tempfile.NamedTemporaryFile() as file:
            file.write(pickle.dumps({tuple(flow): data for flow, data in self.flows.items()}))
            file.flush()
            command = ["ip", "netns", "exec", own, sys.executable, __file__, "replay", file.name, *targets]
            heard = subprocess.run(command, capture_output=True, check=True).stdout
        return Answer(len(targets) * len(self.flows), heard)

    @staticmethod
    def _address(space: str) -> str:
        shown = subprocess.run(["ip", "-n", space, "-4", "-o", "addr"], capture_output=True, text=True, check=True)
        return next(word[3].split("/")[0] for word in map(str.split, shown.stdout.splitlines()) if word[1] != "lo")


class Listener(NamedTuple):
    """A listening port, and a process that has it."""

    address: str
    port: int
    program: str
    pid: int


def listeners(space: str) -> list[Listener]:
    """All listeners of a network namespace beyond loopback, without IPv6."""
    shown = ["ip", "netns", "exec", space, "ss", "-Hltnp"]
    found = []
    for line in subprocess.run(shown, capture_output=True, text=True, check=True).stdout.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        users = re.findall(r'\("([^"]*)",pid=(\d+)', line) or [("", "0")]
        if not address.startswith(("127.", "[")):
            found += [Listener(address.partition("%")[0], int(port), program, int(pid)) for program, pid in users]
    return found


@contextlib.contextmanager
def recorded(spaces: Sequence[str]) -> Iterator[Recording]:
    """Record what the interfaces of network namespaces carry during the block."""
    made = Recording()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sniffers = {}
        for space in spaces:
            command = ["ip", "netns", "exec", space, sys.executable, __file__, "record", str(folder / space)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            sniffers[space] = stack.enter_context(process)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield made
        for space, process in sniffers.items():
            process.communicate(timeout=60)
            made.flows |= {Flow(*way): data for way, data in pickle.loads((folder / space).read_bytes()).items()}


def _take(packet: bytes, flows: dict[Flow, dict[int, bytes]]) -> None:
    """Note the bytes of a packet by their position in the stream: packets arrive twice, and in any order."""
    if packet[12:14] == _IPV4 and packet[23] == _TCP:
        at, end = 14 + (packet[14] & 15) * 4, 14 + struct.unpack("!H", packet[16:18])[0]
        source, to = (socket.inet_ntop(socket.AF_INET, one) for one in (packet[26:30], packet[30:34]))
    elif packet[12:14] == _IPV6 and packet[20] == _TCP:
        at, end = 54, 54 + struct.unpack("!H", packet[18:20])[0]
        source, to = (socket.inet_ntop(socket.AF_INET6, one) for one in (packet[22:38], packet[38:54]))
    else:
        return
    port, to_port, sequence = struct.unpack("!HHI", packet[at : at + 8])
    data = packet[at + (packet[at + 12] >> 4) * 4 : end]
    if data:
        flows.setdefault(Flow(source, port, to, to_port), {})[sequence] = data


def _joined(pieces: dict[int, bytes]) -> bytes:
    """The stream of these pieces. Sequence numbers may wrap around."""
    first = next(iter(pieces))
    found = bytearray()
    for sequence in sorted(pieces, key=lambda one: (one - first + (1 << 31)) % (1 << 32)):
        at = (sequence - first) % (1 << 32)
        if at < _LONGEST:
            found[at:at] = b"\0" * max(0, at - len(found))
            found[at : at + len(pieces[sequence])] = pieces[sequence]
    return bytes(found)


def replay(flows: dict[tuple[str | int, ...], bytes], targets: Sequence[str]) -> bytes:
    """Send each of ``flows`` to each of ``targets``; returns all answers."""
    heard = b""
    for target in targets:
        host, _, port = target.rpartition(":")
        for data in flows.values():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 2) as channel:
                channel.settimeout(0.1)
                channel.sendall(data)
                while piece := channel.recv(1 << 16):
                    heard += piece
    return heard


def record(path: str) -> None:
    """Record until standard input ends."""
    flows: dict[Flow, dict[int, bytes]] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_ALL)) as wire:
        wire.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), _BUFFER)
        wire.setblocking(False)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        ends = False
        while not ends:
            ready, _, _ = select.select([wire, sys.stdin], [], [])
            ends = sys.stdin in ready
            with contextlib.suppress(BlockingIOError):
                while True:
                    _take(wire.recv(1 << 17), flows)
    Path(path).write_bytes(pickle.dumps({tuple(flow): _joined(pieces) for flow, pieces in flows.items()}))


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        sys.stdout.buffer.write(replay(pickle.loads(Path(sys.argv[2]).read_bytes()), sys.argv[3:]))
