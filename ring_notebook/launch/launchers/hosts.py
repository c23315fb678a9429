"""Hosts and their slots, from ``host:slots`` lists and host files."""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.rank.rank_variables import free_port, loopback

_SECONDS_TO_DISCOVER = 60.0


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and how many ranks may run on it."""

    name: str
    slots: int


def parse_hosts(text: str, slots: int = 1) -> list[Host]:
    """``"a:2,b"`` as hosts, with ``slots`` where no number is. Raises ValueError that quotes what it cannot read."""
    return [_host(piece.strip(), slots) for piece in text.split(",") if piece.strip()]


def parse_hostfile(text: str, slots: int = 1) -> list[Host]:
    """A host file's text: one ``host``, ``host:2`` or ``host slots=2`` a line, ``#`` starts a comment.

    Raises ValueError with the line number.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            slots_given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
            hosts.append(_host(f"{words[0]}:{slots_given[0]}" if slots_given else words[0], slots))
        except ValueError as error:
            raise ValueError(f"host file, line {number}: {error}") from None
    return hosts


def named_hosts(hosts: str | None, hostfile: str | None, slots: int = 1) -> list[Host]:
    """The hosts that a user has named, in a list or in a file; empty when in neither."""
    if hosts:
        return parse_hosts(hosts, slots)
    return parse_hostfile(Path(hostfile).read_text(), slots) if hostfile else []


def discovered_hosts(script: str, slots: int) -> list[Host]:
    """The hosts that a script prints, one a line, as ``HOST`` or ``HOST:SLOTS``. Raises ValueError when it fails."""
    try:
        done = subprocess.run(
            shlex.split(script), capture_output=True, text=True, timeout=_SECONDS_TO_DISCOVER, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"--host-discovery-script {script} has not ended within {error.timeout:g} s") from None
    if done.returncode:
        raise ValueError(f"--host-discovery-script {script} failed: exit code {done.returncode} {done.stderr.strip()}")
    hosts = parse_hostfile(done.stdout, slots)
    if not hosts:
        raise ValueError(f"--host-discovery-script {script} names no host")
    return hosts


def check_slots(n: int, hosts: Sequence[Host]) -> None:
    """Raises ValueError when ``hosts`` have fewer slots than ``n``."""
    slots = sum(host.slots for host in hosts)
    if n > slots:
        raise ValueError(
            f"{n} ranks need {n} slots, the hosts have {slots} slot{'s' * (slots != 1)}; "
            "give them more (HOST:SLOTS) or start fewer ranks"
        )


def check_interface(name: str, hosts: Sequence[Host]) -> None:
    """Raises ValueError when ranks of this host are to connect to other ``hosts`` through an interface it has not.

    An empty ``name`` leaves the choice to us. What other hosts have is not known here.
    """
    if not name or only_here(hosts) or not any(is_local(host.name) for host in hosts):
        return
    known = sorted(interface for _, interface in socket.if_nameindex())
    if name not in known:
        raise ValueError(
            f"this host has no network interface {name!r}; RING_INTERFACE or `ringrun --network-interface` takes "
            f"one of {', '.join(known)}"
        )


def with_equal_slots(n: int, hosts: Sequence[Host], launcher: str) -> tuple[list[Host], int]:
    """The hosts that ``n`` ranks fill in order, and the ranks of each; the last may have fewer.

    For a ``launcher`` that takes one number of ranks for all hosts. Raises ValueError where they differ.
    """
    check_slots(n, hosts)
    used: list[Host] = []
    for host in hosts:
        if sum(before.slots for before in used) < n:
            used.append(host)
    each = used[0].slots
    if any(host.slots != each for host in used[:-1]) or n - each * (len(used) - 1) > each:
        named = ", ".join(f"{host.name}:{host.slots}" for host in used)
        raise ValueError(
            f"{launcher} starts the same number of ranks on each host, got {named}; give all the same slots"
        )
    return used, each


def only_here(hosts: Sequence[Host]) -> bool:
    """Whether a job on ``hosts`` runs on this host alone; no hosts mean this one."""
    return not hosts or (len(hosts) == 1 and is_local(hosts[0].name))


def master_of(hosts: Sequence[Host]) -> str:
    """``host:port`` of rank 0, which is on the first host; its name is one by which the others know it."""
    if only_here(hosts):
        return loopback()
    first = hosts[0].name
    return f"{socket.gethostname() if is_local(first) else first}:{free_port()}"


def is_local(name: str) -> bool:
    """Whether ``name`` is this host."""
    here = socket.gethostname()
    return name in {"localhost", "127.0.0.1", "::1", here, here.split(".")[0]}


def slots_by_name(hosts: Sequence[Host]) -> dict[str, int]:
    """The slots of each host by its name. A host may be named twice, and all names of this one are one."""
    slots: dict[str, int] = {}
    for host in hosts:
        name = socket.gethostname() if is_local(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    return slots


def _host(piece: str, default: int) -> Host:
    name, colon, slots = piece.partition(":")
    if not name or (colon and not (slots.isdigit() and int(slots) > 0)):
        raise ValueError(f"cannot read host {piece!r}; expected NAME or NAME:SLOTS, for example a:2")
    return Host(name, int(slots) if colon else default)
