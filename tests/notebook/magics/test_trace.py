"""`%ring trace`: the last operations of all ranks, after an error and while ranks are stuck, in a real kernel."""

from __future__ import annotations

from harness.waiting import until
from notebook.kernel import Notebook

CELL = """%%ringtrain --name parted{background}
import time
from ring_notebook.core import world
ring = world.current().communicator
ring.barrier(name="a")
if ring.rank == 1:
    {action}
ring.barrier(name="b")
"""


def test_after_an_error_and_while_ranks_are_stuck(notebook: Notebook) -> None:
    """It names the rank that never came, the line where it raised, the operation and the line of the others."""
    _, shown = notebook.error(CELL.format(background="", action="raise ValueError('boom')"))
    assert "`%ring trace` shows the last operations of all ranks" in shown
    text = "".join(str(one.get("data", {})) for one in notebook.run("%ring trace"))
    assert "rank 1 never came: it raised ValueError: boom at line 7 of the cell" in text, text
    assert "rank 0 called barrier &#x27;b&#x27; at line 8 of the cell" in text, text
    assert "vegalite" in text

    notebook.text(CELL.format(background=" --background --out run", action="time.sleep(600)"))

    def now() -> str:
        return notebook.text("print(repr(run.timeline()))")

    until(lambda: "barrier 'b' at line 8" in now(), why=now)
    assert "rank 1 never came: its program has called nothing after barrier 'a'" in now()
    notebook.run("%ring stop --runs")
    assert "rank 1 never came: it was interrupted at line 7 of the cell" in notebook.text(
        "import contextlib\nwith contextlib.suppress(KeyboardInterrupt): run.wait()\nprint(repr(run.timeline()))"
    )
    notebook.run("%%ringtrain\npass")
    name, shown = notebook.error("%ring trace")
    assert "Only runs that fail or are interrupted leave their last operations" in f"{name} {shown}"
