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

from ring_notebook.rank.secure_streams import Tls, tls_of_secret

HELLO = Tls(tls_of_secret(os.urandom(32), server=False), server=False).begin()
"""The beginning of a proof that others have recorded, or that knows another secret."""
HELD = 400
"""Connections that are open at a time: three times as many as are let wait."""
WORDS = [
    b"",
    HELLO[:1],
    HELLO[: len(HELLO) // 2],
    HELLO,
    HELLO * 2,
    HELLO + HELLO[:5] + os.urandom(len(HELLO)),
    struct.pack("!BHH", 22, 0x0301, 0xFFFF),
    struct.pack("!BHH", 23, 0x0303, 16) + os.urandom(16),
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
