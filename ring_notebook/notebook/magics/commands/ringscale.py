"""`%%ringscale`: the cell on several numbers of ranks."""

from collections.abc import Sequence
from typing import Annotated

from ring_notebook.analysis.prediction import compare, link_rate
from ring_notebook.analysis.scaling import Kind, Measured, rank_counts, write_csv
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
from ring_notebook.text.line_options import count
from ring_notebook.text.words import plural


@command("cells")
def scale(
    session: Session,
    cell: str,
    sizes: Annotated[Sequence[int], Option("1,2,4", "numbers of ranks", rank_counts)],
    name: Annotated[str, Option("--name NAME", "name of the runs")] = "",
    timeout: Annotated[float, Option("--timeout S", "stop each run after S seconds", float)] = 0.0,
    repeat: Annotated[int, Option("--repeat N", "run each size N times; show the median", count)] = 1,
    warmup: Annotated[int, Option("--warmup N", "steps at the beginning not to count", count)] = 1,
    kind: Annotated[
        Kind,
        Option("--strong", "the global batch is to stay the same", const="strong", exclusive=True),
        Option("--weak", "it is to grow with the ranks", const="weak", exclusive=True),
    ] = "",
    logical: Annotated[
        int, Option("--logical L", "train as L ranks would on each size, and compare all that they log", count)
    ] = 0,
    csv: Annotated[str, Option("--csv FILE", "write the numbers to this file")] = "",
    out: Annotated[str, Option("--out VAR", "assign the table to this variable; VAR.points")] = "",
    predict: Annotated[Sequence[int], Option("--predict 8,64", "sizes to predict from the others", rank_counts)] = (),
    link: Annotated[
        float | None, Option("--link 25Gbit", "rate of each host's network, to predict with", link_rate)
    ] = None,
    gpus_per_host: Annotated[
        int | None, Option("--gpus-per-host N", "ranks of each host, to predict with", count)
    ] = None,
) -> ScalingReport:
    """Run the cell on several numbers of ranks, one after the other, and compare.

    ``kind`` is what the user means to measure. ``link`` is in bytes per second. Raises as `run_cell`.
    """
    check_syntax(cell, first_line=2)
    if 0 < logical < max(sizes):
        raise RingError(f"--logical: expected at least {max(sizes)}, the greatest size, got {logical}")
    if csv:
        open(csv, "a").close()  # before the runs, which may take hours
    start_if_none(session, max(sizes))
    for size in sizes:  # all of them, before the first one runs
        session.require().check_size(size)
    runs: list[Measured] = []
    logs: dict[int, RunRecord] = {}
    for number in range(1, repeat + 1):  # every size in turn, so that all see what the machine does meanwhile
        for size in sorted(set(sizes)):
            title = f"{name or 'scale'} {size}{f' #{number}' if repeat > 1 else ''}"
            one_rank = runs[0].rate if runs and runs[0].ranks == 1 else 0.0
            options = CellOptions(size, name=title, timeout=timeout, one_rank=one_rank, warmup=warmup, logical=logical)
            given: list[Run] = []
            run_cell(session, cell, options, give=given.append)
            log = logs[size] = given[0].log
            runs.append(measured_run(log, warmup))
            if not runs[-1].rate and log.view().samples_per_s:
                raise RingError(f"{title}: the cell logged too few steps after --warmup {warmup}; let it make more")
    points, notes = compare(runs, kind, predict, link, gpus_per_host)
    if not any(one.energy.joules for one in runs) and (why := energy_text(runs[-1].energy)):
        notes = [*notes, f"{why[:1].upper()}{why[1:]}."]
    if logical:
        first, *others = sorted(logs)
        notes = [
            *notes,
            *(compared(logs[first], logs[one], (_on(first), _on(one))) for one in others),
        ]
    if csv:
        write_csv(points, csv)
    report = ScalingReport(points, "\n".join(notes))
    if out:
        session.variables[out] = report
    return report


def _on(size: int) -> str:
    return f"the run on {plural(size, 'rank')}"
