"""`%ring notify`: news of long runs."""

from typing import Annotated

from ring_notebook.errors import RingError
from ring_notebook.notebook.line_command import Option, command
from ring_notebook.notebook.run import notifications
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.line_options import seconds


@command("runs")
def notify(
    session: Session,
    function: Annotated[str, Option("NAME", "call it with a notice; off: no notices")] = "",
    after: Annotated[float | None, Option("--after S", "of runs of S seconds or more; by default 60", seconds)] = None,
) -> str:
    """Say when a long run ends, fails, logs NaN or is stuck: in JupyterLab, and by a function of this notebook.

    Raises RingError if the notebook has no such function.
    """
    if function not in ("", "off") and not callable(session.variables.get(function)):
        raise RingError(f"no function {function} in this notebook")
    if function or after is not None:
        tell = None if function in ("", "off") else session.variables[function]
        notifications.notify(tell, after=notifications.AFTER if after is None else after, lab=function != "off")
    return notifications.described()
