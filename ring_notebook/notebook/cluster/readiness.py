"""Whether ranks of a cluster can take a cell now: they exist, they live, and the last one has ended on them."""

from __future__ import annotations

from collections.abc import Sequence

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.engines import Engines, died
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.style import rank_list, ranks

__all__ = ["SECONDS_TO_SETTLE", "check_ranks", "require_idle", "require_living"]

SECONDS_TO_SETTLE = 2.0
"""A new run waits so long for ranks that are still ending the previous one."""


def check_ranks(n: int, wanted: Sequence[int]) -> None:
    """Raise ClusterError for ranks that a cluster of ``n`` does not have, ValueError for none, or one named twice."""
    if missing := [rank for rank in wanted if not 0 <= rank < n]:
        raise ClusterError(f"no rank {', '.join(map(str, missing))}: this cluster has ranks 0 to {n - 1}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"expected at least one rank, and each once, got {list(wanted)}")


def require_living(engines: Engines, wanted: Sequence[int]) -> None:
    """Raise ClusterError when one of these ranks of the cluster has died."""
    deaths = engines.deaths()
    if dead := [rank for rank in wanted if rank in deaths]:
        others = rank_list(engines.living()).replace(" ", "")
        raise ClusterError(f"{died(dead)}, `%%ringtrain -t {others}` runs on the others")


def require_idle(engines: Engines, run: Run | None, heals: bool, but: Sequence[int] = ()) -> None:
    """Raise ClusterError when a rank executes ``run``, other than those of ``but``.

    ``heals`` says whether such a rank can be started again alone.
    """
    if run is None:
        return
    if not run.done:
        raise ClusterError(
            f"run {run.log.title} is in progress ({run.describe()}); stop it with "
            "`%ring interrupt`, the Stop button or `Run.stop()`"
        )
    if run.wait_idle(SECONDS_TO_SETTLE) or not (stuck := sorted(set(run.busy).difference(but))):
        return
    again = ",".join(map(str, sorted({*stuck, *but, *engines.deaths()})))
    advice = f"`%ring heal -t {again}` restarts what does not stop, " if heals else ""
    raise ClusterError(
        f"the last run has not stopped on {ranks(stuck)}: {run.describe()}; {advice}`%ring restart` ends it"
    )
