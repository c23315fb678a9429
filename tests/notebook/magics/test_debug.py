"""`%ring debug` in a real kernel: pdb over the exception that ended a rank's cell."""

from __future__ import annotations

import pytest

from notebook.kernel import Notebook

CELL = """%%ringtrain
ring.barrier()
def inner(x):
    secret = x * 2
    return 1 / (x - 1)

def outer():
    return inner(ring.rank())

outer()
ring.barrier()
"""


def test_without_an_exception_there_is_nothing_to_debug(notebook: Notebook) -> None:
    assert "no rank has failed in the last cell" in notebook.error("%ring debug")[1]
    notebook.run("%%ringtrain\npass")
    assert "no rank has failed in the last cell" in notebook.error("%ring debug")[1]
    assert "rank 0: its last cell has left no exception" in notebook.error("%ring debug -t 0")[1]
    assert "no rank 7" in notebook.error("%ring debug -t 7")[1]


def test_commands_on_the_line_begin_in_the_frame_that_raised(notebook: Notebook) -> None:
    assert notebook.error(CELL)[0] == "ZeroDivisionError"
    text = notebook.text("%ring debug -c 'p secret' -c up -c 'p __name__' -c where -c 'p nothing'")
    assert text.startswith("rank 1:\n")
    assert "return 1 / (x - 1)" in text
    assert "\n2\n" in text
    assert "return inner(ring.rank())" in text
    assert "runner.py" not in text, "the frames begin in the cell"
    assert "NameError" in text
    assert "ring.barrier()" in notebook.text("%ring debug -t 0 -c where")


def test_a_dialogue_ends_with_q_and_the_next_cell_works(notebook: Notebook) -> None:
    assert notebook.error(CELL)[0] == "ZeroDivisionError"
    asked, printed, reply = notebook.talk("%ring debug", "p secret", "", "q")
    assert reply["status"] == "ok"
    assert asked == ["rank 1 (Pdb) "] * 3
    assert "2\n" in printed
    assert "all 2" in notebook.text("%%ringtrain\nring.barrier()\nprint('all', ring.size())")
    assert "no rank has failed" in notebook.error("%ring debug")[1], "another cell has run since"


def test_a_run_on_other_ranks_is_not_in_the_way(notebook: Notebook) -> None:
    notebook.run("%%ringtrain -t 0 --background\nimport time\nfor _ in range(3000): time.sleep(0.01)")
    assert notebook.error("%%ringtrain -t 1\nsecret = 6\n1 / 0")[0] == "ZeroDivisionError"
    assert "42\n" in notebook.text("%ring debug -c 'p 7 * secret'")
    notebook.run("%ring stop --runs")


@pytest.mark.slow  # `make test` runs test_the_ranks_stop_too
def test_a_command_can_be_interrupted(notebook: Notebook) -> None:
    assert notebook.error(CELL)[0] == "ZeroDivisionError"
    name, _ = notebook.error("%ring debug -c '!import time; time.sleep(100)'", interrupt_when=lambda: True)
    assert name == "KeyboardInterrupt"
    assert "\n2\n" in notebook.text("%ring debug -c 'p secret'")
