"""What one notebook has: its cluster, its last run, and the cells that set its ranks up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from threading import Thread
from typing import Any

from IPython.display import display

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.magics.cell_check import check_syntax
from ring_notebook.notebook.panel.panel import load_charts
from ring_notebook.notebook.record.run_log import RunRecord
from ring_notebook.notebook.run.catalogue import find
from ring_notebook.notebook.run.export import Script, export, set_up_cells
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.scaling import ScalingReport, measure
from ring_notebook.notebook.style import plural
from ring_notebook.notebook.table import Listing

__all__ = ["Session"]

# A cell that ends sooner than this shows its report only: widgets would cost more than the run.
_LIVE_AFTER = 0.1


class Session:
    """The state behind the magics. ``run`` is the last one started."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.run: Run | None = None
        self._names: dict[str, list[str]] = {}
        self._setup: list[RunRecord] = []

    def start(self, n: int | None = None, hosts: str = "", keep: bool = False) -> str:
        """Start a cluster; says how many engines and why, or that such a one runs.

        Raises ClusterError when another one runs.
        """
        if self.cluster is not None and self.cluster.running:
            return self._running(self.cluster, n, hosts, keep)
        if self.cluster is not None:
            self.cluster.stop()
            self.cluster = None
        cluster = Cluster(n, hosts, keep=keep)
        Thread(target=load_charts, name="ring-preload", daemon=True).start()  # while the engines start
        self.cluster = cluster.start()
        return f"Started {_engines(cluster)} ({cluster.why}) in {cluster.seconds_to_start:.1f} s."

    def _running(self, cluster: Cluster, n: int | None, hosts: str, keep: bool) -> str:
        """What to say of a cluster that runs when one like this is asked for. Raises ClusterError for another one."""
        if cluster.serves(n, hosts, keep):
            return f"A cluster of {_engines(cluster)} is running already."
        restart = f", or `%ring restart -n {n}` starts it anew with {n}" if cluster.serves(None, hosts, keep) else ""
        raise ClusterError(
            f"a cluster of {_engines(cluster)} is running; `%ring stop` ends it, for `%ring start` to start "
            f"another one{restart}"
        )

    def attach(self) -> str:
        """Find a cluster that another kernel has started here, and show the run that goes on in it.

        In a notebook that has a cluster of its own: show its last run, with all that it has printed. So somebody who
        comes back to a page that was closed meanwhile has missed nothing.
        """
        if self.cluster is not None and self.cluster.running:
            text = f"This notebook has a cluster of {_engines(self.cluster)}."
            return f"{text} {self._show_run() or 'No cell has run on it yet.'}"
        self.cluster = Cluster.attach()
        self.run = self.cluster.last_run
        return f"Attached to {_engines(self.cluster)}. {self._show_run() or 'No run is under way.'}"

    def _show_run(self) -> str:
        """Show the last run and say whether it has ended; empty without one."""
        if self.run is None:
            return ""
        self.run.show(self.run.log.options.get("plot", ()), _LIVE_AFTER)
        return f"Run {self.run.log.name or self.run.log.run} {'has ended' if self.run.done else 'is under way'}."

    def interrupt(self) -> str:
        """Stop the run that is under way, and leave the cluster as it is; says what became of it."""
        if self.run is None or self.run.done:
            return "No run is under way."
        self.run.stop()
        return f"Run {self.run.log.name or self.run.log.run} {'has ended' if self.run.done else 'has not stopped yet'}."

    def stop(self) -> str:
        """Stop the cluster, if there is one."""
        cluster, self.cluster = self.cluster, None
        if cluster is None:
            return "There is no cluster."
        cluster.stop()
        if cluster.foreign:
            return f"Left the cluster of {_engines(cluster)}, which another notebook has started and keeps."
        return f"Stopped {_engines(cluster)}."

    def restart(self, n: int | None = None, rerun: bool = False) -> str:
        """Start the cluster anew, with ``n`` engines if given, and ``rerun`` the set-up cells in order."""
        cluster = self.require()
        cluster.restart(n)
        text = f"Restarted {_engines(cluster)} in {cluster.seconds_to_start:.1f} s; the ranks' variables are gone."
        if not rerun:
            return text
        cells = set_up_cells(self._setup)
        for cell in cells:
            self.train(cell.source, **cell.options)
        return f"{text} Ran {plural(len(cells), 'set-up cell')} again."

    def require(self) -> Cluster:
        """The cluster. Raises ClusterError when there is none."""
        if self.cluster is None:
            raise ClusterError("there is no cluster; `%ring start` starts one")
        return self.cluster

    def train(
        self,
        cell: str,
        *,
        n: int | None = None,
        name: str = "",
        timeout: float = 0.0,
        plot: Sequence[str] = (),
        timeline: bool = False,
        background: bool = False,
        setup: bool = False,
        first_line: int = 2,
        cell_id: str = "",
    ) -> Run:
        """Run a cell on ranks 0..n-1 and show it; starts a cluster where there is none.

        With ``setup`` `restart` can run it again, and of the cell ``cell_id``, where that is known, the last version.
        Returns when the run has ended (at once with ``background``). Raises what `Cluster.run` and `Run.wait`
        raise.
        """
        check_syntax(cell, first_line)
        if self.cluster is None:
            print(self.start(n))  # noqa: T201
        cluster = self.require()
        options = {
            "n": n,
            "name": name,
            "timeout": timeout,
            "plot": list(plot),
            "timeline": timeline,
            "setup": setup,
            "cell_id": cell_id,
        }
        run = self.run = cluster.run(cell, n=n, name=name, timeout=timeout, first_line=first_line, options=options)
        if setup:
            self._setup = [*set_up_cells(self._setup), run.log]
        run.show(plot, live_after=0.0 if background else _LIVE_AFTER, apart=not background)
        if background:
            return run
        try:
            return run.wait()
        finally:
            run.show_displays()
            if timeline:
                with contextlib.suppress(FileNotFoundError):  # a cluster that died has sent none
                    display(run.timeline())

    def scale(self, cell: str, sizes: Sequence[int], *, name: str = "", timeout: float = 0.0) -> ScalingReport:
        """Run a cell at several sizes of the cluster, one after the other, and compare their throughput."""
        check_syntax(cell, first_line=2)
        if self.cluster is None:
            print(self.start(max(sizes)))  # noqa: T201
        for size in sizes:  # all, before the first one has run in vain
            self.require().check_size(size)
        runs = [
            self.train(cell, n=size, name=f"{name or 'scale'} {size}", timeout=timeout) for size in sorted(set(sizes))
        ]
        return ScalingReport(measure([run.summary for run in runs]))

    def export(self, path: str, name: str = "") -> Script:
        """Write the cell of the last run, or of the one whose name begins with ``name``, as a script for ``ringrun``.

        Raises RingError when there is no such run, or ``path`` is a file that was not exported.
        """
        if name:
            return export(find(name), path)
        if self.run is None:
            raise RingError("no cell has run in this notebook; name a run: `%ring runs` lists those there are")
        return self.run.export(path)

    def status(self) -> Listing:
        """The engines and what they are doing, as a table."""
        cluster = self.require()
        rows = [[str(value) for value in engine.values()] for engine in cluster.status()]
        return Listing(["rank", "host", "pid", "gpu", "state"], rows, f"{_engines(cluster)}: {cluster.why}")

    def pull(self, names: Sequence[str], rank: int) -> tuple[dict[str, Any], Listing]:
        """Variables of ``rank`` by name, and a table of what every rank has under these names."""
        cluster = self.require()
        values = {name: cluster.pull(name, rank) for name in names}
        rows = []
        for name in names:
            kinds = [kinds.get(name, "missing") for kinds in cluster.variables(name)]
            rows += [[name, str(index), kind] for index, kind in enumerate(kinds)]
        return values, Listing(["name", "rank", "value"], rows, f"pulled from rank {rank}")

    def names(self, path: str = "") -> list[str]:
        """What rank 0 has (behind ``path`` and a dot, where given); what was known last while it is at work."""
        if self.cluster is not None and self.cluster.running and (self.run is None or self.run.done):
            with contextlib.suppress(ClusterError):
                self._names[path] = self.cluster.names(path)
        return self._names.get(path, [])


def _engines(cluster: Cluster) -> str:
    return plural(cluster.n, "engine")
