"""Notices of runs in a real kernel: what the callable gets, and that the cell does not notice when it raises."""

from __future__ import annotations

from notebook.kernel import Notebook

WAIT = """
import time
deadline = time.monotonic() + 60
while len(told) < {count}:
    assert time.monotonic() < deadline
    time.sleep(0.01)
print([(one.event, one.name) for one in told])
"""


def test_a_function_of_the_notebook_is_told(notebook: Notebook) -> None:
    notebook.run("told = []\ndef tell(notice):\n    told.append(notice)\n    raise OSError('no network')")
    said = notebook.text("%ring notify tell --after 0")
    assert "A run of 0 s or more tells" in said
    assert "tell when it ends, fails, logs NaN or inf, or makes no progress." in said
    # NaN is told while the cell runs: it ends only when the function has been called.
    notebook.text(
        "%%ringtrain --name broken --background\nimport time, pathlib\nring.log(loss=float('nan'))\n"
        "while not pathlib.Path('seen').exists(): time.sleep(0.02)"
    )
    assert "[('NaN', 'broken')]" in notebook.text(WAIT.format(count=1))
    notebook.run("import pathlib; pathlib.Path('seen').touch()")
    assert "[('NaN', 'broken'), ('ok', 'broken')]" in notebook.text(WAIT.format(count=2))
    notebook.error("%%ringtrain --name wrong\n1 / 0")
    assert "('failed', 'wrong')" in notebook.text(WAIT.format(count=3) + "print(told[-1])")
    assert "ZeroDivisionError: division by zero" in notebook.text("print(told[-1])")
    notebook.error("%%ringtrain --name checks\nassert ring.rank() == 0")
    assert "('failed', 'checks')" in notebook.text(WAIT.format(count=4))
    said = "AssertionError: assert ring.rank() == 0 (rank 1, line 2)"
    assert notebook.text("print(told[-1].error, str(told[-1]).split(chr(10))[1], sep='|')") == f"{said}|{said}\n"
    assert "No run gives a notice." in notebook.text("%ring notify off")


def test_a_name_that_is_no_function(notebook: Notebook) -> None:
    # The function of the test before may still raise, which prints a line of its own.
    assert notebook.error("%ring notify nobody") == ("RingError", "RingError: no function nobody in this notebook")
