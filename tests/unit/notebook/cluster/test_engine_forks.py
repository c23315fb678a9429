"""What engines import before they are forked holds for each of them."""

from __future__ import annotations

import sys

from harness.programs import ran

IMPORT = """
import os, sys, traceback
from importlib import import_module
from ring_notebook.notebook.cluster.engine_forks import _OF_AN_ENGINE

own, asked = os.getpid, []

def getpid():
    files = [frame.filename for frame in traceback.extract_stack(limit=3)[:-1]]
    asked.extend(file for file in files if "ring_notebook" in file)
    return own()

os.getpid = getpid
for module in _OF_AN_ENGINE:
    import_module(module)
print(asked)
"""


def test_their_imports_remember_no_process() -> None:
    """It would be that of the process that forks them."""
    done = ran([sys.executable, "-c", IMPORT], check=True)
    assert done.stdout == "[]\n"
