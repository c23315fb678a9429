"""Prepares, restarts, adds and ends engines, and makes all living ones form again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from time import time

from ring_notebook.analysis.time_limits import REGISTERING
from ring_notebook.config import config
from ring_notebook.errors import ClusterError
from ring_notebook.launch.supervisor.engine_supervisor import Request
from ring_notebook.machine.process_life import began
from ring_notebook.notebook.cluster.death import Death
from ring_notebook.notebook.cluster.death_watch import LostRanks
from ring_notebook.notebook.engines import Engine, Engines
from ring_notebook.notebook.run.takeover import journals_of

NOT_HERE = (
    "`%ring heal` needs engines that our own supervisor has started: all of these end when one dies; use "
    "`%ring restart --rerun`"
)
"""The advice where engines cannot be started one by one."""

_FORGET_TIMEOUT = 10.0


def heal(
    engines: Engines,
    lost: LostRanks,
    request: Callable[[Request, int, str], None],
    ranks: Sequence[int],
    n: int,
    directory: Path,
    keep: bool,
    formation: int,
) -> None:
    """Start the engines of ``ranks``, which are among ``n``, and have all `meet` in ``formation``.

    They replace engines that have died or are ended now, or follow the last one. ``request`` asks the supervisor. After
    a failure or an interrupt, ``ranks`` count as dead, another call may start them, and new ones are not added. Raises
    ClusterError, which explains the death of a rank that died meanwhile.
    """
    deaths, before = lost.deaths, len(engines.all)
    try:
        for rank in ranks:
            lost.expect(rank)
            request("end", rank, "")
            engines.forget(rank, formation, _FORGET_TIMEOUT)
            request("start", rank, str(formation))
        ended = functools.partial(_failed, lost, ranks)  # `lost` watches them only once they have registered
        engines.wait_for(ranks, config().start_limit(REGISTERING), ended)
        for started in prepare_engines(engines, n, directory, keep, True, ranks, ended):
            engine = replace(started, replaced=time(), reports=lost.reports(started.rank))
            engines.all[engine.rank : engine.rank + 1] = [engine]
            lost.watch([engine])
        meet(engines, engines.living(), formation, n)
    except BaseException:
        for rank in ranks:
            end(lost, request, rank, "was ended and not started again", deaths.get(rank))
        if n > before:
            remove(engines, lost, request, before, n, formation)
        raise


def remove(
    engines: Engines, lost: LostRanks, request: Callable[[Request, int, str], None], n: int, before: int, formation: int
) -> None:
    """End all engines of ``before`` but the first ``n``, which are to `meet` again in ``formation``."""
    request("size", n, "")
    del engines.all[n:]
    for rank in range(n, before):
        lost.forget(rank)
    for rank in range(n, before):
        engines.forget(rank, formation, _FORGET_TIMEOUT)


def end(
    lost: LostRanks,
    request: Callable[[Request, int, str], None],
    rank: int,
    how: str,
    before: Death | None = None,
) -> None:
    """End the engine of ``rank``. Its death is the one ``before``, else ``how`` describes it."""
    lost.expect(rank)
    request("end", rank, "")
    lost.add(rank, before or Death(f"rank {rank} {how}", rank, advice="`%ring heal` starts it again"))


def _failed(lost: LostRanks, ranks: Sequence[int]) -> str:
    """Why one of ``ranks`` has ended instead of starting; empty while none has."""
    for rank in ranks:
        if death := lost.ended(rank):
            return f"{death.reason} while it started; `%ring heal` tries again.\nThe end of its log:\n{death.log}"
    return ""


_SETUP = "ring_notebook.engine.setup"
_TIMEOUT = 120.0


def prepare_engines(
    engines: Engines,
    n: int,
    directory: Path,
    keep: bool,
    replaceable: bool,
    ranks: Sequence[int] | None = None,
    trouble: Callable[[], str] = str,
) -> list[Engine]:
    """Prepare all engines of the cluster of ``n`` in ``directory``, or only ``ranks``; returns what each is.

    With ``replaceable`` they have yet to `meet`. Raises ClusterError when one is not the rank that it should be, and
    with the text of ``trouble`` as soon as it returns one.
    """
    wanted = list(range(n)) if ranks is None else list(ranks)
    journals = str(journals_of(directory)) if keep else ""
    found = engines.call(
        f"{_SETUP}:prepare", str(directory), journals, replaceable, ranks=wanted, timeout=_TIMEOUT, trouble=trouble
    )
    for rank, about in zip(wanted, found, strict=True):
        if (about["rank"], about["size"]) != (rank, n):
            raise ClusterError(
                f"engine {rank} of {n} is rank {about['rank']} of {about['size']} in MPI: launcher and mpi4py belong "
                "to different MPIs; see RING_MPIEXEC"
            )
    return [
        Engine(
            about["rank"],
            about["host"],
            about["pid"],
            about["gpu"],
            began(about["pid"]) if replaceable and about["host"] == gethostname() else 0,
            about["threads"],
            status_file=about["status_file"],
        )
        for about in found
    ]


def meet(engines: Engines, ranks: Sequence[int], formation: int, n: int) -> None:
    """Have these engines, all of ``n`` that live, form again, in new ring memory. Their variables stay.

    ``formation`` must be greater than in every earlier call, even a failed one.
    """
    engines.call(f"{_SETUP}:form", formation, list(ranks), n, ranks=ranks, timeout=_TIMEOUT)
