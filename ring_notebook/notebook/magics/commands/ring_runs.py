"""`%ring runs`: the runs on disk."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from ring_notebook.errors import ReplayDiffers, RingError
from ring_notebook.notebook.cluster.cluster_folders import lives
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_start import start_if_none
from ring_notebook.notebook.magics.commands.ringtrain import Out, assign
from ring_notebook.notebook.run import agent_calls, catalogue
from ring_notebook.notebook.run.equal_runs import compared
from ring_notebook.notebook.run.export import set_up_before
from ring_notebook.notebook.run.pages import write_pages
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import count
from ring_notebook.text.words import plural

_Run = Annotated[str, Option("RUN", "beginning of its name or id", complete=known_names.runs)]
_Runs = Annotated[Sequence[str], Option("RUN", "beginnings of names or ids", many=True, complete=known_names.runs)]


@command("runs")
def runs(
    _session: Session,
    every: Annotated[bool, Option("--all", "also short cells that logged nothing")] = False,
    sort: Annotated[str, Option("--sort NAME", "by a column, metric or parameter; --sort=-NAME: smallest first")] = "",
    where: Annotated[Sequence[str], Option("--where WORD", "only runs with these words, or lr=0.1", many=True)] = (),
) -> Listing:
    """List the runs of this folder, newest first."""
    return catalogue.listing(every=every, sort=sort, where=where, lives=lives)


@runs.command
def compare(_session: Session, names: _Runs) -> Any:
    """Show runs, or all of a sweep, side by side: what was set, what came out, charts, and how their cells differ."""
    return catalogue.compare(names)


@runs.command
def calls(_session: Session) -> Listing:
    """List what agents have called in this folder, newest first."""
    return agent_calls.calls()


@runs.command
def replay(
    session: Session,
    name: _Run,
    n: Annotated[int | None, Option("-n N", "number of ranks; by default as then", count)] = None,
    until: Annotated[
        int | None, Option("--until STEP", "open pdb in the cell before this step, from 0, of logical ranks", int)
    ] = None,
    out: Out = "",
) -> str:
    """Run a cell of an earlier run again, after its set-up cells, and compare all that it logs, bit by bit.

    On another number of ranks only a training of logical ranks can be equal: raises RingError for any other. Such a
    training ends at the first step whose gradients differ, and the text says which.
    """
    record = catalogue.find(name)
    options = CellOptions.of(record.options)
    noted = record.params.get("logical_ranks")  # by prepare(logical=...)
    logical = options.logical or (noted if isinstance(noted, int) else 0)
    n = n or record.size
    if n != record.size and logical < n:
        ran = f"{record.title} ran on {plural(record.size, 'rank')}"
        if logical:
            raise RingError(f"{ran} with {plural(logical, 'logical rank')}, too few for {plural(n, 'rank')}")
        raise RingError(
            f"{ran} without logical ranks (`--logical N` or prepare(logical=N)); leave -n out, because other numbers "
            "of ranks give other sums"
        )
    if until is not None and not logical:
        raise RingError(f"{record.title} ran without logical ranks, whose steps `--until` counts; use breakpoint()")
    start_if_none(session, n)
    session.require().check_size(n)
    for cell in set_up_before(record):
        run_cell(session, cell.source, replace(CellOptions.of(cell.options), n=n, ranks=None))
    again = replace(options, n=n, ranks=None, name=f"{record.title} again")
    again = replace(again, repeats=record.run, until=-1 if until is None else until)
    if record.view().changes:
        again = replace(again, replay=record.run)
    given: list[Run] = []
    try:
        run_cell(session, record.source, again, give=given.append)
        is_part = False
    except (ReplayDiffers, KeyboardInterrupt):  # the user may have ended pdb
        if not given:
            raise
        is_part = True
    assign(session, out, given[0])
    return compared(record, given[0].log, ("the record", "this run"), is_part)


@runs.command
def page(
    _session: Session,
    folder: Annotated[str, Option("FOLDER", "where to write them; made where it is not there")],
    every: Annotated[bool, Option("--all", "also short cells that logged nothing")] = False,
) -> str:
    """Write a list of all runs and the report of each as pages without scripts, for any web server."""
    return write_pages(Path(folder), every=every)


@runs.command
def output(_session: Session, names: _Runs) -> str:
    """Write what the ranks of runs have printed, each line with its rank."""
    return "\n".join(map(catalogue.write_output, names))


@runs.command
def tag(
    _session: Session,
    name: _Run,
    tags: Annotated[Sequence[str], Option("TAG", "beside those that it has; none: take all away", many=True)] = (),
) -> str:
    """Give a run tags."""
    return catalogue.tag(name, tags)


@runs.command
def note(
    _session: Session,
    name: _Run,
    words: Annotated[Sequence[str], Option("WORD", "the text, in place of the one before", many=True)] = (),
) -> str:
    """Give a run a note."""
    return catalogue.annotate(name, " ".join(words))


@runs.command
def delete(_session: Session, names: _Runs) -> str:
    """Delete runs that have ended, or whose notebook and cluster are gone."""
    return catalogue.delete(names, lives)
