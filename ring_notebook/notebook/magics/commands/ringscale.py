"""`%%ringscale`: the cell on several numbers of ranks."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from IPython.display import display

from ring_notebook.analysis.prediction import ScalingOptions, compare
from ring_notebook.analysis.scaling import Measured, rank_counts, write_csv
from ring_notebook.errors import RingError
from ring_notebook.machine.energy import energy_text
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.magics.commands.ring_start import start_if_none
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.equal_runs import compared
from ring_notebook.notebook.run.run import Run
from ring_notebook.notebook.run.scaling_report import ScalingReport, measured_run
from ring_notebook.notebook.session.cells import check_syntax
from ring_notebook.notebook.session.run_cell import run_cell
from ring_notebook.notebook.session.session import Session
from ring_notebook.protocol.ringtrain_options import CellOptions
from ring_notebook.text.line_options import count, duration
from ring_notebook.text.words import plural


@command("cells", ScalingOptions)
def scale(
    session: Session,
    cell: str,
    sizes: Annotated[Sequence[int], Option("1,2,4", "numbers of ranks", rank_counts)],
    name: Annotated[str, Option("--name NAME", "name of the runs")] = "",
    timeout: Annotated[float, Option("--timeout 20m", "stop each run after this time", duration)] = 0.0,
    logical: Annotated[
        int, Option("--logical L", "train as L ranks would on each size, and compare all that they log", count)
    ] = 0,
    out: Annotated[str, Option("--out VAR", "assign the table to this variable; VAR.points")] = "",
    **options: Any,
) -> ScalingReport:
    """Run the cell on several numbers of ranks, one after the other, and compare.

    ``options`` are fields of `ScalingOptions`. Raises as `run_cell`, after it has shown what was measured before.
    """
    asked = ScalingOptions(**options)
    check_syntax(cell, first_line=2)
    if 0 < logical < max(sizes):
        raise RingError(f"--logical: expected at least {max(sizes)}, the greatest size, got {logical}")
    if asked.csv:
        open(asked.csv, "a").close()  # before the runs, which may take hours
    start_if_none(session, max(sizes))
    for size in sizes:  # all of them, before the first one runs
        session.require().check_size(size)
    runs: list[Measured] = []
    logs: dict[int, RunRecord] = {}
    order = sorted(set(sizes)) * asked.repeat  # every size in turn, so that all see what the machine does meanwhile
    try:
        for at, size in enumerate(order):
            number = at // len(set(sizes)) + 1
            title = f"{name or 'scale'} {size}{f' #{number}' if asked.repeat > 1 else ''}"
            one_rank = runs[0].rate if runs and runs[0].ranks == 1 else 0.0
            own = CellOptions(
                size, name=title, timeout=timeout, one_rank=one_rank, warmup=asked.warmup, logical=logical
            )
            given: list[Run] = []
            run_cell(session, cell, own, give=given.append)
            log = given[0].log
            run = measured_run(log, asked.warmup)
            if not run.rate and log.view().samples_per_s:
                few = f"too few steps after --warmup {asked.warmup}"
                raise RingError(f"{title}: the cell logged {few}; let it make more")
            runs.append(run)
            logs[size] = log
    except BaseException:  # what was measured, perhaps for hours, is shown all the same
        if runs:
            note = f"Measured before the error: {plural(len(runs), 'run')} of {len(order)}."
            display(_report(session, runs, logs, asked, out, note))
        raise
    return _report(session, runs, logs, asked, out)


def _report(
    session: Session,
    runs: Sequence[Measured],
    logs: Mapping[int, RunRecord],
    asked: ScalingOptions,
    out: str,
    note: str = "",
) -> ScalingReport:
    """The report of ``runs``, at least one, which the variable ``out`` gets; the numbers are in the file asked for."""
    points, notes = compare(runs, asked)
    if not any(one.energy.joules for one in runs) and (why := energy_text(runs[-1].energy)):
        notes.append(f"{why[:1].upper()}{why[1:]}.")
    first, *others = sorted(logs)
    if logs[first].options.get("logical"):
        notes += [compared(logs[first], logs[one], (_on(first), _on(one))) for one in others]
    if asked.csv:
        try:
            write_csv(points, asked.csv)
        except OSError as error:
            notes.append(f"Not written to {asked.csv}: {error}")
    report = ScalingReport(points, "\n".join([*notes, *filter(None, [note])]))
    if out:
        session.variables[out] = report
    return report


def _on(size: int) -> str:
    return f"the run on {plural(size, 'rank')}"
