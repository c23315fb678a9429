"""Cells that are executed while a background run uses their ranks wait for it, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from notebook.kernel import Notebook

# In the kernel: a run that ends, one way or another, when the notebook has as many cells in its queue.
HELPERS = """
import pathlib, threading, time
queue = get_ipython().magics_manager.registry["RingMagics"]._session.waiting

def when_waiting(count, action):
    def look():
        while len(queue.cells) != count:
            time.sleep(0.01)
        action()
    threading.Thread(target=look, daemon=True).start()

def once(condition):
    while not condition():
        time.sleep(0.01)
"""
UNTIL = "%%ringtrain --background --name long --out long\nimport pathlib, time\n"
UNTIL += "while not pathlib.Path('enough').exists(): time.sleep(0.01)\n"
ENOUGH = "pathlib.Path('enough').touch()"


@pytest.fixture(scope="module")
def notebook(notebook: Notebook) -> Notebook:
    notebook.run(HELPERS)
    return notebook


@pytest.fixture(autouse=True)
def _empty(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%ring queue cancel")
    notebook.run("%ring stop --runs")
    notebook.run("once(lambda: not queue.cells)\npathlib.Path('enough').unlink(missing_ok=True)")


def test_a_cell_waits_for_the_background_run_and_says_so(notebook: Notebook) -> None:
    notebook.run(f"{UNTIL}kept = 8")
    notebook.run(f"when_waiting(1, lambda: (time.sleep(0.5), {ENOUGH}))")
    text = notebook.text("%%ringtrain --name next\nassert kept == 8\nprint('now')")
    assert re.search(r"Waiting for run long: \d\.\d s", text)
    assert "[0-1] now" in text
    assert "No cell waits." in notebook.text("%ring queue")


def test_an_interrupt_ends_the_waiting_and_not_the_run(notebook: Notebook) -> None:
    notebook.run(f"{UNTIL}kept = 9")
    notebook.run("import os, signal\nwhen_waiting(1, lambda: os.kill(os.getpid(), signal.SIGINT))")
    name, shown = notebook.error("%%ringtrain\nkept = 10")
    assert name == "KeyboardInterrupt"
    assert "stopped waiting for run long; this cell has not run" in shown
    assert notebook.text("print(long.status, queue.cells)") == "running []\n"
    notebook.run(ENOUGH)
    notebook.text("%%ringtrain\nassert kept == 9")


def test_background_cells_wait_in_order_are_listed_and_cancelled(notebook: Notebook) -> None:
    notebook.run(f"{UNTIL}seen = ['long']")
    note, *_ = notebook.run("%%ringtrain --background --name second --out second\nseen.append('second')")
    assert "Cell second waits for run long. `%ring queue cancel 1` cancels it." in note["data"]["text/plain"]
    notebook.run("%%ringtrain --background --name third -t 1 --out third\nseen.append('third')")
    notebook.run("%%ringtrain --background --name fourth --out fourth\nseen.append('fourth')")
    listed = notebook.text("%ring queue").splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["1", "second"], ["2", "third"], ["3", "fourth"]]
    assert "run long and cell second" in listed[2]
    assert "no cell 7 waits" in notebook.error("%ring queue cancel 7")[1]
    assert notebook.text("%ring queue cancel 2") == "Cancelled cell third.\n"
    assert notebook.text("print(second)") == "<cell second on ranks 0-1: waits for run long>\n"
    notebook.run(ENOUGH)
    assert notebook.text("print(fourth.wait().status)") == "ok\n"
    assert notebook.text("print(third)") == "<cell third on rank 1: was cancelled before it began>\n"
    assert "cell third was cancelled" in notebook.error("third.wait()")[1]
    assert notebook.text("print(second.wait().status, type(second).__name__)") == "ok Run\n"
    notebook.text("%%ringtrain\nassert seen == ['long', 'second', 'fourth'], seen")


@pytest.mark.parametrize("foreground", [True, False])
def test_after_a_failed_run_the_queue_goes_on_and_says_so(notebook: Notebook, foreground: bool) -> None:
    notebook.run(f"{UNTIL}1 / 0")
    if foreground:
        notebook.run(f"when_waiting(1, lambda: {ENOUGH})")
        text = notebook.text("%%ringtrain --name next\nprint('still')")
        assert "Cell next runs after run long, which has failed." in text
    else:
        notebook.run("%%ringtrain --background --name next --out next_run\nprint('still')")
        outputs = notebook.document.cells[-1].outputs
        # In one cell, because what a kernel shows between two cells does not reach this notebook.
        notebook.text(f"{ENOUGH}\nprint(next_run.wait().status)")
        text = "".join(str(output["data"]) for output in outputs)
        assert "Cell next runs after run long, which has failed." in text
    assert "still" in text


def test_who_stops_a_run_is_told_what_runs_next(notebook: Notebook) -> None:
    notebook.run(UNTIL)
    notebook.run("%%ringtrain --background --name next --out next_run\nkept = 11")
    said = notebook.text("%ring stop --runs")
    assert "Run long has ended.\nNext runs cell next; `%ring queue` lists what waits" in said
    assert notebook.text("print(next_run.wait().status)") == "ok\n"


def test_when_a_rank_has_died_the_queue_waits_for_the_heal(notebook: Notebook) -> None:
    notebook.run("%%ringtrain --setup\nmade = 'by the set-up cell'")
    notebook.run(f"{UNTIL}import os\nif ring.rank() == 1: os.kill(os.getpid(), 9)\nring.barrier()")
    notebook.run("%%ringtrain --background --name next --out next_run\nassert made == 'by the set-up cell'")
    notebook.run(ENOUGH)
    assert "killed by SIGKILL" in notebook.error("long.wait()")[1]
    notebook.run("once(lambda: 'died' in queue.cells[0].behind)")
    assert "rank 1 has died; `%ring heal` starts it again" in notebook.text("%ring queue")
    assert "Ran 1 set-up cell on rank 1." in notebook.text("%ring heal")
    assert notebook.text("print(next_run.wait().status)") == "ok\n"


def test_a_restart_cancels_what_waits_and_says_so(notebook: Notebook) -> None:
    notebook.run(UNTIL)
    notebook.run("%%ringtrain --background --name next --out next_run\npass")
    assert "all variables of ranks are lost. Cancelled 1 cell of the queue." in notebook.text("%ring restart")
    assert "cell next was cancelled" in notebook.error("next_run.wait()")[1]


def test_a_question_of_the_run_before_is_answered_where_a_cell_waits(notebook: Notebook) -> None:
    notebook.run(f"{UNTIL}answer = input('Name? ') if ring.rank() == 0 else ''")
    notebook.run(f"when_waiting(1, lambda: {ENOUGH})")
    asked, printed, reply = notebook.talk("%%ringtrain --name next\nprint('answer', answer)", "Ada")
    assert asked == ["rank 0: Name? "]
    assert reply["status"] == "ok", printed
