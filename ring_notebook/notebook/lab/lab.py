"""`Lab`: a cluster with its runs, for programs: cells in the background with limits, branches, comparisons."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from ring_notebook.errors import RingError
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.files.snapshot_files import Snapshot
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.cluster.cluster_folders import lives
from ring_notebook.notebook.cluster.snapshots import continued
from ring_notebook.notebook.lab.answers import Compared, Said, Table, clean, said, table
from ring_notebook.notebook.lab.handle import PERSON, Handle, Limits, keep_limits
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.send_cell import spoken_name
from ring_notebook.notebook.session.cell_queue import QueuedCell
from ring_notebook.notebook.session.cells import check_syntax
from ring_notebook.notebook.session.run_cell import send_cell, set_up
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.style import shown
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.words import plural, rank_list

_MOST_HANDLES = 500  # that a laboratory remembers; older runs are found on disk
_MOST_BRANCHES = 100
_BLANK = re.compile(r"(?:[ \t]*\n)+")


class Lab:
    """A cluster with its runs, for programs. As a context manager it ends, or leaves, its cluster.

    ``session`` belongs to a notebook; runs wait in its queue. Each run records that ``who`` asked for it, and ``begun``
    is called with each run when it begins.

        with Lab.start(n=2) as lab:
            run = lab.run(cell, steps=500)
            run.wait("loss < 0.1", timeout=60)
            print(run.verdict())
    """

    def __init__(self, session: Session, who: str = "", begun: Callable[[Run], None] = lambda _: None) -> None:
        self.session = session
        self.who = who
        self.stopped: dict[str, str] = {}
        """By id of a run: which caller of this laboratory, or which limit, has stopped it."""
        self._begun = begun
        self._is_guest = False  # whether a notebook has the cluster
        self._handles: deque[Handle] = deque(maxlen=_MOST_HANDLES)

    @classmethod
    def start(cls, n: int | None = None, hosts: str = "", *, keep: bool = False, on: str = "") -> Lab:
        """A laboratory with a new cluster; parameters and errors are those of `Cluster` and its `start`."""
        session = Session(tell=lambda _: None)
        session.cluster = Cluster(n, hosts, keep=keep, on=on).start()
        return cls(session)

    @classmethod
    def attach(cls, which: str = "") -> Lab:
        """A laboratory with a cluster that runs already; parameter and errors are those of `Cluster.attach`.

        In a notebook that has a cluster it is that one, if none is named: runs wait in one queue with its cells, and
        `close` does nothing.
        """
        own = Session.of_kernel
        if not which and own is not None and own.cluster is not None:
            lab = cls(own)
            lab._is_guest = True
            return lab
        session = Session(tell=lambda _: None)
        session.cluster = Cluster.attach(which)
        session.run = session.cluster.last_run
        return cls(session)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel waiting runs and end the cluster, or leave a notebook's cluster. Does nothing the second time."""
        if not self._is_guest:
            self._end()

    def _end(self) -> None:
        self.session.waiting.cancel()
        cluster, self.session.cluster = self.session.cluster, None
        if cluster is not None:
            cluster.stop()

    def asked_by(self, who: str) -> Lab:
        """The same laboratory for ``who``: its new runs and changes record this name."""
        other = copy(self)
        other.who = who
        return other

    @property
    def cluster(self) -> Cluster:
        """The cluster. Raises ClusterError when there is none."""
        return self.session.require()

    def run(
        self,
        cell: str,
        *,
        n: int | None = None,
        name: str = "",
        seconds: float = 0.0,
        steps: int = 0,
        samples: int = 0,
        keep: bool = False,
        **options: Any,
    ) -> Handle:
        """Run a cell on ranks 0..n-1 (all by default) in the background, when no run before it uses one of them.

        It is stopped after so many ``seconds``, optimizer ``steps`` or ``samples`` of all ranks, 0 for never; with
        ``keep`` the limit of steps keeps the variables first, for `branch`. Returns at once; `wait` and `verdict` tell
        what becomes of it. Raises CellSyntaxError for a cell that does not compile, ClusterError for ranks that the
        cluster has not got. ``options`` are fields of `CellOptions`.
        """
        limits = _checked(Limits(seconds, steps, samples, keep))
        blank = _BLANK.match(cell)  # blank lines, which IPython would drop before it counts the others from 1
        above = blank[0].count("\n") if blank else 0
        cell = "\n".join(cell.split("\n")[above:])
        given = CellOptions(**{"first_line": 1 + above, **options}, n=n, timeout=seconds, who=self.who)
        given = replace(given, pause_at=(*given.pause_at, steps)) if steps else given
        check_syntax(cell, given.first_line)
        name = name or spoken_name(runs_directory())
        ranks = frozenset(self.cluster.chosen(given.n, given.ranks))
        queued = QueuedCell(name, ranks)
        handle = Handle(self, name, lambda: queued.run, queued)
        start = partial(send_cell, self.session, cell, given, queued)
        self._enqueue([(queued, start, [(handle, limits)])])
        return handle

    def _enqueue(
        self, cells: Sequence[tuple[QueuedCell, Callable[[], Run], Sequence[tuple[Handle, Limits]]]], alone: bool = True
    ) -> None:
        """Begin cells one after another from a thread, each at its turn in the queue of the notebook.

        If no cell is before the first, this call begins it, and so raises its error.
        """
        for queued, _, made in cells:
            self.session.waiting.enter(queued)
            self._handles.extend(handle for handle, _ in made)

        def begin(index: int) -> None:
            queued, start, made = cells[index]
            self.session.waiting.begin(queued, start, lambda: None)
            for handle, limits in made:
                keep_limits(handle, limits, self.stopped)
                if handle.run is not None:
                    self._begun(handle.run)

        def follow(first: int) -> None:
            for index in range(first, len(cells)):
                with suppress(Exception):  # its handles have the error
                    begin(index)

        waits = bool(cells[0][0].behind)
        if not waits and alone:
            begin(0)
        rest = 0 if waits or not alone else 1
        if rest < len(cells):
            Thread(target=follow, args=(rest,), name="ring-lab-queue", daemon=True).start()

    def begin_branches(
        self, snapshot: Snapshot, settings: Sequence[Mapping[str, Any]], limits: Limits, beside: bool = True
    ) -> list[Handle]:
        """Continue the run of a snapshot once for each of ``settings``, see `Handle.branch`."""
        limits = _checked(limits)
        if not 1 <= len(settings) <= _MOST_BRANCHES:
            raise RingError(f"expected 1 to {_MOST_BRANCHES} settings of branches, got {len(settings)}")
        cell, cluster = continued(snapshot), self.cluster
        # Rank r of a larger cluster has all that rank r % size has, so its parts are copies of the snapshot.
        parts: list[range | None] = [None]
        if cluster.n > snapshot.size:
            last = cluster.n - snapshot.size if beside else 0
            parts = [range(start, start + snapshot.size) for start in range(0, last + 1, snapshot.size)]
        options = replace(cell.options, timeout=limits.seconds, who=self.who)
        options = replace(options, pause_at=(limits.steps,) if limits.steps else ())
        branches: list[Handle] = []

        def begin(queued: QueuedCell, first: int, names: Sequence[str], runs: dict[int, Run]) -> Run:
            if by := next((one for one in branches if one.ended_by == PERSON), None):
                queued.cancelled = True
                raise RingError(f"a person stopped {by.name}, so the branches after it do not begin")
            self.cluster.restore(snapshot.name, snapshot.size if parts[0] else None)
            for at, name in enumerate(names):
                own = replace(options, name=name, ranks=parts[at], knobs=dict(settings[first + at]))
                runs[at] = send_cell(self.session, cell.source, own, QueuedCell(name, frozenset()))
            return runs[0]

        cells = []
        for first in range(0, len(settings), len(parts)):
            names = [
                " ".join([snapshot.name, *(f"{knob}={shown(value)}" for knob, value in own.items())])
                for own in settings[first : first + len(parts)]
            ]
            queued, runs = QueuedCell(names[0], frozenset(range(cluster.n))), dict[int, Run]()
            made = [Handle(self, name, partial(runs.get, at), queued) for at, name in enumerate(names)]
            branches += made
            cells.append((queued, partial(begin, queued, first, names, runs), [(handle, limits) for handle in made]))
        self._enqueue(cells, alone=False)
        return branches

    def find(self, name: str = "") -> Handle:
        """The run that begins with ``name``: one of this laboratory, of the cluster, or on disk. By default the newest.

        Raises RingError when there is none.
        """
        if not name and (newest := self._newest()) is not None:
            return newest
        for handle in reversed(self._handles):
            log = handle.log
            if handle.name == name or (log is not None and log.run.startswith(name)):
                return handle
        for run in reversed(self.session.at_hand):
            if not name or run.log.title == name or run.log.run.startswith(name):
                return Handle(self, run.log.title, lambda run=run: run)  # type: ignore[misc]
        for handle in reversed(self._handles):
            if handle.name.startswith(name):
                return handle
        record = catalogue.find(name)
        return Handle(self, record.title, record=record)

    def _newest(self) -> Handle | None:
        """The run that began last, here or by a cell of the notebook; one that waits, if it was asked for later."""
        run, last = self.session.run, self._handles[-1] if self._handles else None
        if run is None or (last is not None and last.log is None and last.asked > run.log.started):
            return last
        mine = (one for one in reversed(self._handles) if one.log is not None and one.log.run == run.log.run)
        return next(mine, None) or Handle(self, run.log.title, lambda: run)

    def runs(self, *where: str, most: int = 20, sort: str = "", every: bool = True) -> Table:
        """The newest runs of this folder with their results, as `%ring runs` lists them: those that have all words of
        ``where`` (``failed``, ``lr=0.1``), sorted by a column or metric.
        """
        most = max(1, min(most, 200))
        return _table(catalogue.listing(most, every=every, sort=sort, where=where, lives=lives))

    def compare(self, *runs: str | Handle) -> Compared:
        """Two to twenty runs side by side: what was set, what came out, how their cells differ. Raises RingError for
        unknown ones.
        """
        if not 2 <= len(runs) <= 20:
            raise RingError(f"expected 2 to 20 runs to compare, got {len(runs)}")
        records = [one._begun() for one in (self.find(run) if isinstance(run, str) else run for run in runs)]
        found = catalogue.compared(records)
        titles = [record.title for record in records]
        diffs = [clean(line, 160) for diff in found.diffs(titles) for line in diff.splitlines()]
        return Compared(_table(found.settings()), _table(found.outcome()), tuple(diffs[:200]))

    def stacks(self) -> Said:
        """Where every rank is now, in the cell and in what it has called. Raises ClusterError without a cluster."""
        lines = self.session.stacks().splitlines()
        return said(f"The stacks of {plural(self.cluster.n, 'rank')}", lines, most=200)

    def queue(self) -> Table:
        """The cells that wait for ranks, the next one first."""
        rows = [[one.name, rank_list(one.ranks), one.behind] for one in self.session.waiting.cells]
        return table(("name", "ranks", "waits for"), rows, "" if rows else "no cell waits")

    def start_cluster(self, n: int | None = None) -> Table:
        """Start a cluster of ``n`` ranks. Raises RingError where there is one already."""
        if self.session.cluster is not None or self.session.job is not None:
            raise RingError("a cluster runs already; stop_cluster ends it")
        self.session.cluster = Cluster(n).start()
        return self.status()

    def stop_cluster(self) -> None:
        """End the cluster with all variables, and cancel what waits. Raises RingError for that of a batch job."""
        if self.session.job is not None:
            raise RingError("a batch job holds this cluster; its notebook ends it")
        self._end()

    def heal(self) -> Said:
        """Start ranks that have died again, and run the set-up cells there; the others keep their variables.

        Raises as `Cluster.heal`, and what a set-up cell raises.
        """

        def run(cell: str, options: CellOptions, only: Sequence[int]) -> None:
            name = spoken_name(runs_directory())
            send_cell(self.session, cell, options, QueuedCell(name, frozenset(only)), only).wait()

        with self.session.waiting.held():
            started = self.cluster.heal()
            ran = set_up(self.session, started, run) if started else ""
        return said(f"started again: {rank_list(started) or 'none'}. {ran}".strip())

    def status(self) -> Table:
        """The ranks of the cluster: which live, and which run each executes. A note where there is no cluster."""
        if self.session.cluster is None:
            return table(("rank",), [], "there is no cluster")
        busy = {rank: run.log.title for run in self.session.in_progress for rank in run.ranks}
        rows = [
            [one.rank, one.host, one.state, busy.get(one.rank, ""), one.memory_text] for one in self.cluster.status()
        ]
        return table(("rank", "host", "state", "run", "memory"), rows)


def _checked(limits: Limits) -> Limits:
    if min(limits.seconds, limits.steps, limits.samples) < 0:
        raise RingError(f"a limit is 0 or more, got {limits}")
    if limits.keep and not limits.steps:
        raise RingError("keep needs a limit of steps; it keeps the variables after the last of them")
    return limits


def _table(listing: Listing) -> Table:
    return table(listing.columns, listing.rows, listing.note)
