"""`%ring default on` in a real kernel: plain cells run on the ranks, and what a notebook understands works in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.kernel import Notebook


@pytest.fixture(scope="module")
def notebook(notebook: Notebook) -> Iterator[Notebook]:
    assert "Cells run on the 2 engines" in notebook.text("# everywhere\n%ring default on")
    yield notebook
    notebook.text("%ring default off")


def test_a_plain_cell_runs_on_every_rank(notebook: Notebook) -> None:
    text = notebook.text("rank = ring.rank()\nprint('this is rank', rank)")
    assert "ok" in text.splitlines()[0], "the mark of a cell of the ranks is the headline of its run"
    assert "2 ranks" in text
    assert "this is rank 0" in text
    assert "this is rank 1" in text
    assert notebook.error("%%local\nrank")[0] == "NameError"


def test_equal_values_are_shown_once_and_others_by_rank(notebook: Notebook) -> None:
    assert len(re.findall(r"\b42\b", notebook.text("6 * 7"))) == 1
    text = notebook.text("100 + rank")
    assert re.search(r"0\W.*\b100$", text, re.MULTILINE)
    assert re.search(r"1\W.*\b101$", text, re.MULTILINE)


def test_shell_lines_magics_and_help_work(notebook: Notebook) -> None:
    text = notebook.text("lines = !echo from a shell\n%precision 2\nprint(lines[0])")
    assert "from a shell" in text
    notebook.run("def area(width, height):\n    'The area of a rectangle.'\n    return width * height")
    text = notebook.text("area?")
    assert "The area of a rectangle." in text
    assert "area(width, height)" in text


def test_await_works_and_a_task_survives_its_cell(notebook: Notebook) -> None:
    notebook.run("import asyncio\nevent = asyncio.Event()")
    text = notebook.text("task = asyncio.create_task(event.wait())\nawait asyncio.sleep(0)\nring.rank()")
    assert re.search(r"1\W.*\b1$", text, re.MULTILINE)
    assert "True" in notebook.text("event.set()\nawait task")


def test_an_error_has_the_line_of_the_cell(notebook: Notebook) -> None:
    name, shown = notebook.error("x = 1\nif ring.rank() == 1:\n    1 / 0\nring.barrier()")
    assert name == "ZeroDivisionError"
    assert "Cell, line 3" in shown
    name, shown = notebook.error("x = 1\nif x\n    pass")
    assert name == "CellSyntaxError"
    assert "Cell, line 2" in shown
    assert "later" in notebook.text("print('later')")


def test_an_interrupt_ends_an_await(notebook: Notebook, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    waits = "import asyncio\ndone = []\nwhile True:\n    await asyncio.sleep(0.01); done.append(1)"
    name, _ = notebook.error(f"{waits}; open({str(begun)!r}, 'w').close()", interrupt_when=begun.exists)
    assert name == "KeyboardInterrupt"
    assert "did not go on" in notebook.text(
        "seen = len(done)\nawait asyncio.sleep(0.2)\nprint('did not go on' if len(done) == seen > 0 else 'went on')"
    )


def test_local_cells_and_ring_lines_stay_here(notebook: Notebook) -> None:
    notebook.run("%%local\nhere = 'in the notebook'\nassert 'rank' not in globals()")
    assert notebook.text("%%local\nprint(here)") == "in the notebook\n"
    assert "2 engines" in notebook.text("%ring status")
    name, shown = notebook.error("y = 1\n%ring status")
    assert name == "CellSyntaxError"
    assert "%ring within a cell that runs on the ranks; give it a cell of its own" in shown


def test_code_that_a_front_end_sends_for_itself_stays_here(notebook: Notebook) -> None:
    client = notebook.client.kc
    reply = notebook.loop.run_until_complete(
        client._async_execute_interactive("inspected = 'here'", store_history=False, timeout=60)
    )
    assert reply["content"]["status"] == "ok"
    assert notebook.text("%%local\nprint(inspected)") == "here\n"


def test_a_name_of_the_ranks_is_completed_and_its_absence_here_explained(notebook: Notebook) -> None:
    notebook.run("velocity = 1")
    assert "velocity" in notebook.complete("velo")
    name, shown = notebook.error("%%local\nvelocity")
    assert name == "NameError"
    assert "name 'velocity' is not defined; the ranks have it: `%ring pull velocity` brings it here" in shown
    _, shown = notebook.error("%%local\nvelocty")
    assert "Did you mean: 'velocity', which the ranks have? `%ring pull velocity`" in shown
    _, shown = notebook.error("%%local\nvelocitxy = 1\nvelocitx")
    assert "which the ranks have" not in shown, "that of the notebook is closer"
    notebook.run(
        "%%ringtrain --background --out busy\nimport time\nacceleration = 2\nring.log(begun=1)\n"
        "while True:\n    time.sleep(0.01)"
    )
    notebook.run("%%local\nimport time\nwhile not busy.metrics:\n    time.sleep(0.02)")
    _, shown = notebook.error("%%local\nacceleration")
    assert "the ranks have it: `%ring pull acceleration`" in shown, "while they are busy"
    notebook.run("%%local\nbusy.stop()")


def test_off_brings_cells_back(notebook: Notebook) -> None:
    """As does a stop: `test_magics.py`."""
    assert "Cells run in this notebook" in notebook.text("%ring default off")
    assert notebook.text("print('plain')") == "plain\n"


def test_a_misspelt_word_gets_a_suggestion(notebook: Notebook) -> None:
    for line, meant in (("%ring default onn", "on"), ("%%ringtrain --timelime\npass", "--timeline")):
        shown = "".join(output.get("text", "") for output in notebook.run(line))
        assert shown.startswith("UsageError")
        assert f"did you mean {meant}?" in shown
