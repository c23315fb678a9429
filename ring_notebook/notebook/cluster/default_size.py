"""How many engines a cluster gets and on which hosts, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_notebook.launch.hosts_of_job import find_allocation
from ring_notebook.launch.launchers.hosts import Host, check_slots, only_here
from ring_notebook.machine.gpus import gpus, sharing
from ring_notebook.machine.hardware import cores


@dataclass(frozen=True, slots=True)
class Size:
    """``n`` engines on ``hosts``, this host when there are none, and the reason in words."""

    n: int
    hosts: tuple[Host, ...]
    why: str


def choose_size(n: int | None = None, hosts: Sequence[Host] = ()) -> Size:
    """The size of a cluster of ``n`` engines on ``hosts``, chosen where not given.

    The hosts are those of the batch system's allocation, else this one. The number of engines is the number of slots,
    else of GPUs, else of cores, at least 2. Raises ValueError when several hosts have too few slots.
    """
    allocation = None if hosts else find_allocation()
    where = tuple(allocation.hosts if allocation else hosts)
    if allocation and not only_here(where):
        allocation.check_slots(n or 1)
    elif not only_here(where):
        check_slots(n or 1, where)
    slots = sum(host.slots for host in where)
    names = gpus()
    if n:
        why = f"as asked for, in {allocation}" if allocation else "as asked for"
        return Size(n, where, _with_sharing(why, n, where, names))
    # Notebook servers often run as one task that has all cores of its host.
    if slots > 1 or not only_here(where):
        why = str(allocation) if allocation else "the hosts' slots"
        return Size(slots, where, _with_sharing(why, slots, where, names))
    if hosts:
        return Size(slots, where, "the host's slot")
    found, what = (len(names), "GPU") if names else (cores(), "core")
    why = f"one per {what}, {found} found" + (", no GPU" if what == "core" else "")
    if found < 2:
        found, why = 2, f"{why}; at least two"
    return Size(found, where, _with_sharing(f"{why}; {allocation}" if allocation else why, found, where, names))


def _with_sharing(why: str, n: int, hosts: Sequence[Host], names: Sequence[str]) -> str:
    """``why``, plus a note if ranks share the GPUs ``names`` of this host; those of other hosts are unknown."""
    shared = sharing(n, names) if only_here(hosts) else ""
    return f"{why}; {shared}" if shared else why
