"""`%ring snapshots`: the variables of all ranks, saved and brought back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.files.snapshot_files import Snapshot, kept_text
from ring_notebook.notebook.cluster import snapshots as kept
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_restart import restart
from ring_notebook.notebook.magics.commands.ring_start import start
from ring_notebook.notebook.magics.commands.ringtrain import Out, assign
from ring_notebook.notebook.run.export import set_up_cells
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import count, knob_value
from ring_notebook.text.words import plural
from ring_notebook.text.words import ranks as rank_text

_N = Annotated[int | None, Option("-n N", "number of engines; by default as there are, or were", count)]
_Snapshot = Annotated[str, Option("NAME", "of a snapshot", complete=known_names.snapshots)]
_RENAMED = {
    name: f"snapshots {now}" for name, now in (("snapshot", "save"), ("restore", "restore"), ("branch", "branch"))
}


@command("snapshots", replaces={**_RENAMED, "snapshots remove": "snapshots delete"})
def snapshots(_session: Session) -> Listing:
    """List the snapshots of this folder, newest first."""
    return kept.listing()


@snapshots.command
def save(session: Session, name: Annotated[str, Option("NAME", "replaces an older one of this name")]) -> str:
    """Keep the variables of all ranks, and the set-up cells, under a name.

    In a run they are kept after its present step. Raises as `Cluster.snapshot`, and when several runs are in progress.
    """
    if runs := session.in_progress:
        if len(runs) > 1:
            raise RingError(f"{plural(len(runs), 'run')} are in progress; keep one with `RUN.snapshot({name!r})`")
        runs[0].snapshot(name)  # it says so itself, now and when they are kept
        return ""
    return kept_text(session.require().snapshot(name, set_up_cells(session.setup)))


@snapshots.command
def restore(
    session: Session,
    name: _Snapshot,
    n: _N = None,
    rerun: Annotated[bool, Option("--rerun", "run its set-up cells first")] = False,
) -> str:
    """Bring a snapshot back, in this cluster or a new one.

    Raises as `Cluster.restore`, and while a run is in progress.
    """
    return _bring_back(session, kept.find(name), n, rerun)


def _bring_back(session: Session, found: Snapshot, n: int | None, rerun: bool = False, size: int | None = None) -> str:
    """Restore a snapshot in a cluster of ``n``, for a run on the first ``size`` ranks, by default all."""
    if runs := session.in_progress:
        raise RingError(
            f"run {runs[0].log.title} is in progress, and a restore replaces all variables; `%ring stop --runs` first"
        )
    if session.cluster is None and session.job is None:
        session.tell(start(session, n or found.size, sync=session.syncs))
    elif n not in (None, session.require().n):
        session.tell(restart(session, n))
    with session.waiting.held():
        session.setup = kept.set_up_cells(found)
        for cell in session.setup if rerun else ():
            options = CellOptions.of(cell.options)
            run_cell(session, cell.source, replace(options, n=None, ranks=None, setup=False), first=True)
        return session.require().restore(found.name, size)


@snapshots.command
def branch(
    session: Session,
    name: Annotated[str, Option("RUN@STEP", "a snapshot of a run", complete=known_names.snapshots)],
    n: Annotated[int | None, Option("-n N", "number of ranks; by default as the run had", count)] = None,
    called: Annotated[str, Option("--name NAME", "name of the new run")] = "",
    background: Annotated[bool, Option("--background", "return at once")] = False,
    knobs: Annotated[
        Sequence[tuple[str, str]], Option("--set lr=0.05", "values of knobs from there on", knob_value, many=True)
    ] = (),
    out: Out = "",
) -> None:
    """Continue the run of a snapshot from there on, as a new run.

    Raises as `restore`, and what the run raises.
    """
    found = kept.find(name)
    cell = kept.continued(found, called)
    there = session.cluster.n if session.cluster is not None else 0
    size = n or (min(found.size, there) if there else found.size)
    session.tell(_bring_back(session, found, size if size > there else None, size=size))
    if size < there:
        why = "" if n else f", as run {cell.of} did; `-n {there}` takes all"
        session.tell(f"The branch runs on {rank_text(range(size))} of {plural(there, 'rank')}{why}.")
    if cell.begins_anew:
        session.tell(cell.begins_anew)
    options = replace(cell.options, n=size if size < there else None, background=background, knobs=dict(knobs))
    run_cell(session, cell.source, options, give=lambda given: assign(session, out, given))


@snapshots.command
def delete(
    _session: Session,
    names: Annotated[Sequence[str], Option("NAME", "their names", many=True, complete=known_names.snapshots)],
) -> str:
    """Delete snapshots.

    Raises RingError, and deletes nothing, when one is not there.
    """
    return kept.remove(names)
