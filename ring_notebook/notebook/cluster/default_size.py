"""How many engines a cluster gets when nobody says, and why."""

from __future__ import annotations

from collections.abc import Sequence

from ring_notebook.hardware import cores, gpus
from ring_notebook.launch.hosts import Host

__all__ = ["choose_size"]


def choose_size(hosts: Sequence[Host] = ()) -> tuple[int, str]:
    """The number of engines, and the reason in words: the hosts' slots, else GPUs, else cores, at least 2."""
    if hosts:
        return sum(host.slots for host in hosts), "the hosts' slots"
    found, what = (len(gpus()), "GPU") if gpus() else (cores(), "core")
    reason = f"one per {what}, {found} found" + (", no GPU" if what == "core" else "")
    return (found, reason) if found >= 2 else (2, f"{reason}; two are the least that can work together")
