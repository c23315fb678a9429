"""What another user of the machine tries against a job: a program of its own, which begins by becoming that user.

It reads lines of JSON from standard input, what to attack: ports, process ids, folders, abstract sockets. For each it
answers with a line that says what it could read, write or end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NOBODY = 65534
SECONDS = 0.2  # to wait for an answer of a port
AT_ONCE = 32  # ports that are tried
LOOPBACK, ANY = "127.0.0.1", ("0.0.0.0", "::")
HYDRA = b"HYD\0" + bytes(8)
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
SUBSCRIBE_ALL = b"\x00\x01\x01"
# What an intruder sends to a port: one message, then the next after each answer.
TALKS = {
    "hydra": [HYDRA],
    "zmq": [ZMTP, READY + SUBSCRIBE_ALL],
    "http": [b"GET /api/contents HTTP/1.0\r\n\r\n"],
    "pmi": [b"cmd=init pmi_version=1 pmi_subversion=1\n", b"cmd=get_universe_size\n"],
    "noise": [os.urandom(65536)],
}


def talk(address: tuple[str, int], words: list[bytes]) -> bytes:
    """All that the listener at ``address`` answers."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(address, SECONDS) as channel:
        for word in words:
            channel.sendall(word)
            deadline = time.monotonic() + SECONDS
            while (left := deadline - time.monotonic()) > 0 and select.select([channel], [], [], left)[0]:
                data = channel.recv(65536)
                if not data:
                    return heard
                heard += data
    return heard


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return b"opened" if path.endswith("/mem") else file.read(65536)


def files_of(pid: int) -> list[str]:
    found = [f"/proc/{pid}/{name}" for name in ("environ", "maps", "mem", "stack", "syscall", "auxv", "io")]
    with contextlib.suppress(OSError):
        found += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return [*found, f"/proc/{pid}/cwd/.", f"/proc/{pid}/root/etc/shadow"]


def attack_process(pid: int) -> dict[str, bytes]:
    got: dict[str, bytes] = {}
    for path in files_of(pid):
        with contextlib.suppress(OSError):
            got[path] = read_file(path)
    for number in (0, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            got[f"signal {number} to {pid}"] = b"sent"
    return got


def attack_folder(folder: str) -> dict[str, bytes]:
    """Every file below that can be read, and every folder in which one can be made."""
    got: dict[str, bytes] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                got[f"{place}/{name}"] = read_file(f"{place}/{name}")
        with contextlib.suppress(OSError):
            Path(place, "planted").touch()
            got[f"{place}/planted"] = b"made"
    return got


def attack_abstract(name: str) -> dict[str, bytes]:
    got = {}
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
            channel.settimeout(SECONDS)
            channel.connect("\0" + name)
            channel.send(HYDRA)
            got[f"@{name}"] = channel.recv(65536)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(SECONDS)  # the queue of one that nobody reads is full after a few
        channel.sendto(b"\xff" * 64, "\0" + name)
    return got


def attack(target: dict[str, list]) -> dict[str, str]:
    got: dict[str, bytes] = {}
    with ThreadPoolExecutor(AT_ONCE) as callers:
        talks = {
            f"{name} at {host}:{port}": callers.submit(talk, (LOOPBACK if host in ANY else host, port), words)
            for host, port in target.get("ports", ())
            for name, words in TALKS.items()
        }
    got |= {name: talked.result() for name, talked in talks.items()}
    for pid in target.get("pids", ()):
        got |= attack_process(pid)
    for folder in target.get("folders", ()):
        got |= attack_folder(folder)
    for name in target.get("abstract", ()):
        got |= attack_abstract(name)
    return {name: data.decode("latin-1") for name, data in got.items() if data}


"localhost".encode("idna")  # loaded now: the other user may not be allowed to read Python's own files
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
sys.stdout.write("ready\n")
sys.stdout.flush()
for line in sys.stdin:
    sys.stdout.write(json.dumps(attack(json.loads(line))) + "\n")
    sys.stdout.flush()
