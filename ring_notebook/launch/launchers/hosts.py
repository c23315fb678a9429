"""Hosts and their slots, from ``host:slots`` lists and host files."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ring_notebook.rank.rank_variables import bracketed, free_port, loopback

_SECONDS_TO_DISCOVER = 60.0
_MOST_NAMES = 65536  # of one range; Slurm has as many nodes at most


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and how many ranks may run on it."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{bracketed(self.name)}:{self.slots}"


def parse_hosts(text: str, slots: int = 1) -> list[Host]:
    """``"a:2,b"`` as hosts, with ``slots`` where no number is; ``[fd00::1]:2`` or ``fd00::1`` for an IPv6 address.

    ``node[01-04,7]:8`` stands for five hosts. Raises ValueError that quotes what it cannot read.
    """
    return [host for piece in _pieces(text) for host in _expanded(_host(piece, slots))]


def expand_names(text: str) -> list[str]:
    """The short form of Slurm and pdsh for host names: ``"gpu[01-03,7],login"`` -> gpu01, gpu02, gpu03, gpu7, login.

    Raises ValueError that quotes the name it cannot read.
    """
    return [name for piece in _pieces(text) for name in _names(piece)]


def checked_hosts(text: str) -> str:
    """The text, where `parse_hosts` can read it. Raises ValueError as that."""
    parse_hosts(text)
    return text


def parse_hostfile(text: str, slots: int = 1) -> list[Host]:
    """A host file's text: ``host``, ``host:2`` or ``host slots=2`` in each line, ``#`` starts a comment.

    A line may name several as ``host[01-04]``. Raises ValueError with the line number.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            slots_given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
            host = _host(words[0], slots)
            hosts += _expanded(_host(f"{bracketed(host.name)}:{slots_given[0]}", slots) if slots_given else host)
        except ValueError as error:
            raise ValueError(f"host file, line {number}: {error}") from None
    return hosts


def named_hosts(hosts: str | None, hostfile: str | None, slots: int = 1) -> list[Host]:
    """The hosts that a user has named, in a list or in a file; empty when in neither.

    Raises ValueError for a list or a file that names none: its ranks would all start here.
    """
    if hosts is None and hostfile is None:
        return []
    if hosts is not None:
        where, found = f"the list of hosts {hosts!r}", parse_hosts(hosts, slots)
    else:
        where, text = f"the host file {hostfile!r}", Path(hostfile).read_text("utf-8-sig") if hostfile else ""
        found = parse_hostfile(text, slots)
    if not found:
        raise ValueError(f"{where} names no host; expected HOST or HOST:SLOTS for each")
    return found


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
    """Raises ValueError if ranks here are to reach other ``hosts`` through an interface that this host does not have.

    An empty ``name`` leaves the choice to us. The interfaces of other hosts are not checked.
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
        named = ", ".join(map(str, used))
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
    return f"{bracketed(socket.gethostname() if is_local(first) else first)}:{free_port()}"


def is_local(name: str) -> bool:
    """Whether ``name``, which has no case, is this host."""
    here = socket.gethostname().lower()
    return name.lower() in {"localhost", "127.0.0.1", "::1", here, here.split(".")[0]}


def with_one_name(hosts: Sequence[Host]) -> list[Host]:
    """The hosts, each by the first of its names: names have no case, and all names of this host are one."""
    names: dict[str, str] = {}
    return [
        Host(
            socket.gethostname() if is_local(host.name) else names.setdefault(host.name.lower(), host.name), host.slots
        )
        for host in hosts
    ]


def slots_by_name(hosts: Sequence[Host]) -> dict[str, int]:
    """The slots of each host by its name. A host may be named twice."""
    slots: dict[str, int] = {}
    for host in with_one_name(hosts):
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return slots


def place(n: int, hosts: Sequence[Host]) -> dict[str, list[int]]:
    """The ranks of each host, in order, for ``n`` ranks; hosts that get none are left out. No hosts mean this one.

    ``place(3, [Host("a", 2), Host("b", 2), Host("c", 1)])`` gives ``{"a": [0, 1], "b": [2]}``. A host may be named
    twice, and all names of this one are one.
    """
    placed: dict[str, list[int]] = {}
    rank = 0
    for host in with_one_name(hosts or [Host(socket.gethostname(), n)]):
        here = range(rank, min(rank + host.slots, n))
        if here:
            placed.setdefault(host.name, []).extend(here)
        rank += len(here)
    return placed


def _host(piece: str, default: int) -> Host:
    if piece.startswith("["):
        name, bracket, rest = piece[1:].partition("]")
        colon, slots = rest[:1], rest[1:]
        known = bool(bracket) and rest[:1] in ("", ":") and is_ipv6(name)
    elif known := is_ipv6(piece):
        name, colon, slots = piece, "", ""
    else:
        name, colon, slots = piece.partition(":")
        known = bool(name)
    if not known or (colon and not (slots.isdigit() and int(slots) > 0)):
        raise ValueError(f"cannot read host {piece!r}; expected NAME or NAME:SLOTS, for example a:2")
    return Host(name, int(slots) if colon else default)


def _pieces(text: str) -> list[str]:
    """The texts between commas outside of brackets, without empty ones."""
    return [piece.strip() for piece in re.split(r",(?![^\[\]]*\])", text) if piece.strip()]


def _expanded(host: Host) -> list[Host]:
    return [Host(name, host.slots) for name in _names(host.name)]


def _names(short: str) -> Iterator[str]:
    """The names for which ``rack[1-2]n[01-16]`` stands; the digits of the first number of a range are those of all."""
    match = re.search(r"\[([^\[\]]*)\]", short)
    if match is None and not set(short) & set("[]"):
        yield short
        return
    for piece in match[1].split(",") if match else [""]:
        first, _, last = piece.partition("-")
        last = last or first
        known = match and first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < _MOST_NAMES
        if not match or not known:
            raise ValueError(f"cannot read host {short!r}; expected numbers in brackets, for example n[01-04,7]")
        for number in range(int(first), int(last) + 1):
            yield from _names(f"{short[: match.start()]}{number:0{len(first)}d}{short[match.end() :]}")


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address, with a zone or not."""
    try:
        socket.getaddrinfo(text, None, socket.AF_INET6, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return ":" in text
