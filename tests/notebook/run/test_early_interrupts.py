"""An interrupt stops the ranks at whatever moment it comes: while a cell is sent, before its panel, and after that."""

from __future__ import annotations

import pytest

from notebook.kernel import Notebook

TRAIN = """
import os, signal, threading
def train(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    get_ipython().run_cell_magic("ringtrain", "", "import time\\ntime.sleep(100)")
"""


BETWEEN = (0.002, 0.005, 0.02, 0.05, 0.1, 0.11, 0.12, 0.14, 0.17)


@pytest.mark.parametrize("moments", [pytest.param(BETWEEN, marks=pytest.mark.slow), (0.0, 0.01, 0.2)])
def test_the_ranks_stop_too(notebook: Notebook, moments: tuple[float, ...]) -> None:
    notebook.run(TRAIN)
    for seconds in moments:
        name, _ = notebook.error(f"train({seconds})")
        assert (seconds, name) == (seconds, "KeyboardInterrupt")
        assert "next" in notebook.text("%%ringtrain\nprint('next')")
