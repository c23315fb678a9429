"""What another host of the network tries on the ports of a job: a program, `flood.py SECONDS TIMES FILE NAMESPACE...`.

It looks for listeners in each namespace again and again, and connects to all of them without end: with silence, halves
of handshakes, repeated ones, noise, impossible lengths, a byte at a time, and hanging up in the middle. It ends when
its input does, and makes the file once it has connected so many times.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

TCP, RENDEZVOUS = b"ring-notebook 1\n", b"ring-rendezvous 1\n"
HELD = 400
"""Connections that are open at a time: three times as many as are let wait."""
REPEATED = os.urandom(32)
WORDS = [
    b"",
    TCP,
    RENDEZVOUS + b"\0" * 31,
    RENDEZVOUS + REPEATED,
    *(TCP + struct.pack("!ii", one, other) + REPEATED for one in range(4) for other in range(4)),
    struct.pack("!Q", 1 << 62) * 12,
    b"\xff" * 100_000,
    b"GET / HTTP/1.1\r\n\r\n",
    b'cmd=ring_join value={"rank": 0, "size": 4}\n' * 9,
    random.Random(1).randbytes(4096),
]


def listening(space: str) -> list[tuple[str, int]]:
    """The addresses and ports that listen in a network namespace, without those of its ssh server."""
    shown = subprocess.run(["ip", "netns", "exec", space, "ss", "-Hltn"], capture_output=True, text=True, check=False)
    found = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
    return [(address, int(port)) for address, _, port in found if int(port) > 1024 and address.startswith("10.")]


def attack(targets: list[tuple[str, int]], until: float) -> int:
    """Connect to the ``targets`` in turn; how often."""
    held: deque[tuple[socket.socket, bytes]] = deque()
    words = itertools.cycle(WORDS)
    for number in itertools.count():
        if time.monotonic() > until:
            break
        with contextlib.suppress(OSError):
            channel = socket.create_connection(targets[number % len(targets)], 0.5)
            held.append((channel, next(words)))
            channel.setblocking(False)
            channel.send(held[-1][1] if number % 3 else held[-1][1][:1])
        for channel, said in itertools.islice(held, 5):  # those that say one byte at a time
            with contextlib.suppress(OSError):
                channel.send(said[:1])
        while len(held) > HELD:
            held.popleft()[0].close()
    return number


if __name__ == "__main__":
    ends = time.monotonic() + float(sys.argv[1])
    count, enough, spaces = 0, int(sys.argv[2]), sys.argv[4:]
    while time.monotonic() < ends and not select.select([sys.stdin], [], [], 0.02)[0]:
        if targets := [place for space in spaces for place in listening(space)]:
            count += attack(targets, min(ends, time.monotonic() + 1.0))
            if count >= enough:
                Path(sys.argv[3]).touch()
