"""`%ring runs`: the runs on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run import agent_calls, catalogue
from ring_notebook.notebook.run.pages import write_pages
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.session import Session
from ring_notebook.notebook.table import Listing

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
    return catalogue.listing(every=every, sort=sort, where=where)


@runs.command
def compare(_session: Session, names: _Runs) -> Any:
    """Show runs side by side: what was set, what came out, charts, and how their cells differ."""
    return catalogue.compare(names)


@runs.command
def calls(_session: Session) -> Listing:
    """List what agents have called in this folder, newest first."""
    return agent_calls.calls()


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
    """Delete runs that have ended."""
    return catalogue.delete(names)
