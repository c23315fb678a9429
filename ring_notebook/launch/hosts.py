"""Hosts and their slots: from `host:slots` lists, host files, and the allocation of a batch system."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "allocation", "check_slots", "expand_slurm", "named", "parse_hostfile", "parse_hosts"]


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and how many ranks may run on it."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """``"a:2,b"`` as hosts; slots default to 1. Raises ValueError that quotes the piece it cannot read."""
    return [_host(piece.strip()) for piece in text.split(",") if piece.strip()]


def parse_hostfile(text: str) -> list[Host]:
    """A host file's text: one ``host``, ``host:2`` or ``host slots=2`` a line, ``#`` starts a comment.

    Raises ValueError with the line number.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
            hosts.append(_host(f"{words[0]}:{slots[0]}" if slots else words[0]))
        except ValueError as error:
            raise ValueError(f"host file, line {number}: {error}") from None
    return hosts


def named(hosts: str | None, hostfile: str | None) -> list[Host]:
    """The hosts that a user has named, in a list or in a file; empty when in neither."""
    if hosts:
        return parse_hosts(hosts)
    return parse_hostfile(Path(hostfile).read_text()) if hostfile else []


def allocation(env: Mapping[str, str] = os.environ) -> list[Host]:
    """The hosts that Slurm, PBS or LSF gave to this job; empty outside of an allocation."""
    if nodes := env.get("SLURM_JOB_NODELIST"):
        names = expand_slurm(nodes)
        slots = _slurm_counts(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_JOB_CPUS_PER_NODE") or "1")
        slots += slots[-1:] * (len(names) - len(slots))
        return [Host(name, count) for name, count in zip(names, slots, strict=False)]
    if nodefile := env.get("PBS_NODEFILE"):
        return _counted(Path(nodefile).read_text().split())
    if pairs := env.get("LSB_MCPU_HOSTS"):
        words = pairs.split()
        return [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]
    return []


def check_slots(n: int, hosts: Sequence[Host]) -> None:
    """Raises ValueError when ``hosts`` have fewer slots than ``n``."""
    slots = sum(host.slots for host in hosts)
    if n > slots:
        raise ValueError(
            f"{n} ranks were asked for, the hosts have {slots} slot{'s' * (slots != 1)}; raise host:slots or lower -np"
        )


def expand_slurm(nodelist: str) -> list[str]:
    """Slurm's short form of host names: ``"gpu[01-03,7],login"`` -> gpu01, gpu02, gpu03, gpu7, login."""
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist) for name in _expand(part)]


def _expand(part: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        yield part
        return
    before, after = part[: match.start()], part[match.end() :]
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{before}{number:0{len(first)}d}{after}")


def _slurm_counts(text: str) -> list[int]:
    """``"2(x3),1"`` -> [2, 2, 2, 1]."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _counted(names: list[str]) -> list[Host]:
    return [Host(name, slots) for name, slots in Counter(names).items()]


def _host(piece: str) -> Host:
    name, colon, slots = piece.partition(":")
    if not name or (colon and not (slots.isdigit() and int(slots) > 0)):
        raise ValueError(f"cannot read host {piece!r}; expected NAME or NAME:SLOTS, for example a:2")
    return Host(name, int(slots) if colon else 1)
