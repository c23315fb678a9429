"""Whether ranks of a cluster can take a cell now: they exist, they live, and the run before has ended on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.engines import Engines, died
from ring_notebook.notebook.run.run import Run
from ring_notebook.text.words import rank_list, ranks

SECONDS_TO_SETTLE = 2.0
"""Seconds that a new run waits for ranks that are still ending the previous one."""


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
        raise ClusterError(died(dead) + (f", `%%ringtrain -t {others}` runs on the others" if others else ""))


class UnfinishedRuns:
    """The runs that ranks of a cluster still execute: several at a time, each on ranks of its own."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self.last: Run | None = None
        """The newest run, also when it has ended."""

    def add(self, run: Run) -> Run:
        """Remember a run that was sent, and return it."""
        self._runs = [*(one for one in self._runs if not one.done or one.busy), run]
        self.last = run
        return run

    @property
    def in_progress(self) -> list[Run]:
        """The runs that have not ended, oldest first."""
        return [run for run in self._runs if not run.done]

    def busy(self) -> dict[int, str]:
        """The run that each busy rank of the cluster executes; ranks that are ending a run are given a moment."""
        for run in self._runs:
            if run.done:
                run.wait_idle(SECONDS_TO_SETTLE)
        return {rank: run.log.run for run in self._runs for rank in run.busy}

    def require_idle(
        self, engines: Engines, heals: bool, ranks: Collection[int] | None = None, but: Sequence[int] = ()
    ) -> None:
        """Raise ClusterError when one of ``ranks`` (by default any), except ``but``, executes a run.

        ``heals`` says whether such a rank can be started again alone.
        """
        for run in self._runs:
            if ranks is None or not run.ranks.isdisjoint(ranks):
                _require_idle(engines, run, heals, but)

    def leave(self) -> None:
        """Stop watching all of them; they continue."""
        for run in self.in_progress:
            run.leave()


def _require_idle(engines: Engines, run: Run, heals: bool, but: Sequence[int]) -> None:
    if not run.done:
        where = "" if len(run.ranks) == len(engines.all) else f" on {ranks(run.ranks)} of the cluster"
        raise ClusterError(
            f"run {run.log.title} is in progress{where} ({run.describe()}); stop it with "
            "`%ring stop --runs`, the Stop button or `Run.stop()`"
        )
    if run.wait_idle(SECONDS_TO_SETTLE) or not (stuck := sorted(set(run.busy).difference(but))):
        return
    again = ",".join(map(str, sorted({*stuck, *but, *engines.deaths()})))
    advice = f"`%ring heal -t {again}` restarts what does not stop, " if heals else ""
    raise ClusterError(
        f"the last run has not stopped on {ranks(stuck)}: {run.describe()}; {advice}`%ring restart` ends it"
    )
