"""What every rank of a cluster is doing, where it runs, and what it holds: for people as a table, for tools as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ring_notebook.errors import ClusterError
from ring_notebook.machine.process_life import resident
from ring_notebook.notebook.engines import Engine, Engines

EngineState = Literal["idle", "running", "died"]

_MEMORY = "ring_notebook.engine.setup:memory"
_SECONDS_TO_ANSWER = 2.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One rank of a cluster.

    ``device`` is ``CPU``, or ``GPU`` and what CUDA_VISIBLE_DEVICES names it. ``run`` is the id of the run that it
    executes, empty unless its state is ``running``. ``memory`` is what its process holds, in bytes, memory that it
    shares with other ranks included; None when it has died, and on another host while it runs a cell. ``death`` says
    why it has died. It computes with ``threads`` threads, unless a cell has set another number.
    """

    rank: int
    host: str
    pid: int
    device: str
    state: EngineState
    run: str
    memory: int | None
    death: str = ""
    threads: int = 0

    @property
    def memory_text(self) -> str:
        """``512 MiB``; empty where it is not known."""
        return "" if self.memory is None else f"{self.memory / (1 << 20):,.0f} MiB"


def engine_statuses(engines: Engines, busy: Mapping[int, str]) -> list[EngineStatus]:
    """The state of all engines, by rank. ``busy`` has the run that a rank executes."""
    deaths = engines.deaths()
    idle = [one.rank for one in engines.all if not one.local and one.rank not in busy and one.rank not in deaths]
    elsewhere = _ask(engines, idle)
    return [
        EngineStatus(
            one.rank,
            one.host,
            one.pid,
            f"GPU {one.gpu}" if one.gpu else "CPU",
            "died" if one.rank in deaths else "running" if one.rank in busy else "idle",
            "" if one.rank in deaths else busy.get(one.rank, ""),
            _memory(one, elsewhere) if one.rank not in deaths else None,
            str(deaths.get(one.rank, "")).partition("\n")[0],
            one.threads,
        )
        for one in engines.all
    ]


def _memory(engine: Engine, elsewhere: Mapping[int, int]) -> int | None:
    return (resident(engine.pid) or None) if engine.local else elsewhere.get(engine.rank)


def _ask(engines: Engines, ranks: Sequence[int]) -> dict[int, int]:
    """The memory of ranks of other hosts, where they answer."""
    try:
        return dict(zip(ranks, engines.call(_MEMORY, ranks=ranks, timeout=_SECONDS_TO_ANSWER), strict=True))
    except ClusterError:
        return {}
