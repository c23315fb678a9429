"""`%ring plot`: charts of metrics of one run or several."""

from collections.abc import Sequence
from typing import Annotated, Any

from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.record.tags_and_look import AXES, MOST_SMOOTH
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.session import known_names
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import name_list


def _smoothing(text: str) -> float:
    share = float(text)
    if not 0 <= share <= MOST_SMOOTH:
        raise ValueError(f"expected a share from 0 to {MOST_SMOOTH}, got {text}")
    return share


@command("runs")
def plot(
    session: Session,
    metrics: Annotated[
        Sequence[str],
        Option("loss,acc", "metrics; loss+val_loss: both in one chart; 'grad/*': all of them", name_list),
    ],
    runs: Annotated[
        Sequence[str],
        Option("RUN", "beginnings of names or ids; by default the last run", many=True, complete=known_names.runs),
    ] = (),
    x: Annotated[str, Option("-x AXIS", f"the x axis: {', '.join(AXES)}", choices=AXES)] = "",
    smooth: Annotated[float, Option("--smooth 0.9", "average: the share of the value before", _smoothing)] = 0.0,
    log: Annotated[bool, Option("--log", "a logarithmic scale where no value is negative; zeros are left out")] = False,
) -> Any:
    """Chart metrics of the last run, or of several runs in the same charts.

    Raises RingError as `catalogue.plot`.
    """
    return catalogue.plot([session.record(run) for run in runs or [""]], metrics, x, smooth, log)
