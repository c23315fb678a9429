"""Runs a cell on its ranks: when these are free, shown where the user can answer and stop it. Set-up cells too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

from IPython.display import display

from ring_notebook.errors import RingError
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.note import Note, place
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.run.failures import brief
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.send_cell import spoken_name
from ring_notebook.notebook.session.cell_queue import QueuedCell
from ring_notebook.notebook.session.cells import check_syntax
from ring_notebook.notebook.session.live_lines import ElapsedLine
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.words import plural
from ring_notebook.text.words import ranks as rank_text

# A cell that ends sooner than this shows its report only: widgets would cost more than the run.
LIVE_AFTER = 0.1


def run_cell(
    session: Session,
    cell: str,
    options: CellOptions,
    only: Sequence[int] = (),
    give: Callable[[Any], None] = lambda _: None,
    first: bool = False,
) -> None:
    """Run a cell on ranks 0..n-1, or on ``ranks``, of the cluster or of a job that waits for its hosts, and show it.

    While another run uses one of its ranks the cell waits in the queue, with ``first`` before all others. With ``only``
    just these of its engines execute it, also before all others. With ``setup`` `restart` can run it again, in its last
    version with this ``cell_id``. Returns when the run has ended, with ``background`` at once. ``give`` gets the run
    when it has begun, and before it a cell that waits in the background. Raises as `Cluster.run` and `Run.wait`.
    """
    check_syntax(cell, options.first_line)
    to_come = session.to_come  # whose engines will run the cell
    ranks = frozenset((to_come or session.require()).chosen(options.n, options.ranks))
    queued = QueuedCell(options.name or spoken_name(runs_directory()), ranks, first=first or bool(only))
    send = partial(send_cell, session, cell, options, queued, only)
    try:
        session.waiting.enter(queued)
        if queued.behind and (options.background or to_come is not None):
            give(queued)
            _wait_in_background(session, queued, options, send, give)
            return
        with ElapsedLine(lambda: f"Waiting for {queued.behind}:") if queued.behind else contextlib.nullcontext():
            run = session.waiting.begin(queued, send, partial(_answer, session))
    except KeyboardInterrupt as error:
        session.waiting.leave(queued)
        if queued.run is None:
            text = f"stopped waiting for {queued.behind}; this cell has not run" if queued.behind else "interrupted"
            raise brief(error, f"KeyboardInterrupt: {text}") from None
        run = queued.run
        run.interrupt()
    give(run)
    if queued.despite:
        session.tell(queued.despite)
    background = options.background
    try:
        run.show(options.plot, live_after=0.0 if background else LIVE_AFTER, apart=not background)
    except KeyboardInterrupt:  # nobody waits for the run yet, so nobody else would stop it
        run.interrupt()
        background = False
    if background:
        run.show_late()
        return
    try:
        run.wait()
    finally:
        run.show_displays()
        run.show_late()
        if ended := run.ended_ranks:
            session.tell(start_ranks(session, lambda cluster: cluster.heal(ended), "again "))
        if options.timeline:
            with contextlib.suppress(FileNotFoundError):  # the cluster died before it sent one
                display(run.timeline())


def start_ranks(session: Session, start: Callable[[Cluster], list[int]], again: str = "") -> str:
    """Have ``start`` start ranks, and run the set-up cells on these alone.

    Returns how many cells, or nothing for no ranks. Raises what ``start`` raises, and what a set-up cell does.
    """
    cluster = session.require()
    with session.waiting.held():  # until the set-up cells have run
        began = time.monotonic()
        try:
            started = start(cluster)
        except KeyboardInterrupt as error:
            dead = sorted(set(range(cluster.n)) - set(cluster.living)) if cluster.running else []
            then = f"`%ring heal` starts {rank_text(dead)}" if dead else "execute the cell again to start them"
            text = f"interrupted before the ranks had started; the cluster has {plural(cluster.n, 'engine')}, {then}"
            raise brief(error, f"KeyboardInterrupt: {text}") from None
        if not started:
            return ""
        session.tell(
            f"Started {rank_text(started)} {again}in {time.monotonic() - began:.1f} s, without variables; "
            "the others keep theirs."
        )
        return set_up(session, started, partial(run_cell, session))


def set_up(session: Session, started: Sequence[int], run: Callable[[str, CellOptions, Sequence[int]], Any]) -> str:
    """Have ``run`` run the set-up cells on ranks that were ``started``: source, options, ranks. Returns how many.

    Raises what a set-up cell does, and says which ranks it was on.
    """
    ran = 0
    for cell in set_up_cells(session.setup):
        chosen = cell.options.get("ranks") or range(cell.options.get("n") or session.require().n)
        if only := [rank for rank in started if rank in chosen]:
            try:
                run(cell.source, CellOptions.of(cell.options), only)
            except RingError:
                session.tell(f"{rank_text(only)}: a set-up cell failed; run it on all ranks if it communicates.")
                raise
            ran += 1
    return f"Ran {plural(ran, 'set-up cell')} on {rank_text(started)}." if ran else "There are no set-up cells."


def send_cell(session: Session, cell: str, options: CellOptions, queued: QueuedCell, only: Sequence[int] = ()) -> Run:
    """Send a cell whose turn has come."""
    cluster = session.require()
    # Not during a run on other ranks, whose modules would change.
    if session.syncs and not cluster.runs.in_progress and (synced := cluster.sync()).changed:
        session.tell(str(synced))
    run = session.run = cluster.send(cell, options, queued.name, only)
    session.sent.append(run.log.run)
    if options.setup:
        session.setup = [*set_up_cells(session.setup), run.log]
    return run


def _answer(session: Session) -> None:
    """Have the user answer questions of ranks while a cell waits for them: the notebook takes no other cell."""
    for run in session.in_progress:
        if run.asking:
            run.answer()


def _wait_in_background(
    session: Session,
    queued: QueuedCell,
    options: CellOptions,
    send: Callable[[], Run],
    give: Callable[[Any], None],
) -> None:
    """Show that a cell waits, where it will show its run, and run it from another thread when its turn has come."""
    tell = Note().tell
    places = [place(), place()]

    def waits() -> None:
        tell(f"Cell {queued.name} waits for {queued.behind}. `%ring queue cancel {queued.number}` cancels it.")

    def will_have_ranks() -> bool:
        return session.cluster.running if session.cluster is not None else session.job is not None

    def follow() -> None:
        try:
            run = session.waiting.begin(queued, send, waits, keeps_place=will_have_ranks)
        except Exception as error:
            tell(f"{type(error).__name__}: {error}")
            return
        tell(queued.despite)
        give(run)
        run.show(options.plot, places=(places[0], places[1]))

    waits()
    Thread(target=follow, name=f"ring-queued-{queued.number}", daemon=True).start()
