"""What one kernel of the user who runs this meets: starts a cluster, runs a cell, and ends in one of three ways."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from notebook.kernel import Notebook

CELL = """%%ringtrain
import os
from ring_notebook.core import world
print("size", world.current().size, "users", {os.getuid(), os.stat("/proc/self").st_uid})
"""


def main() -> None:
    notebook = Notebook(Path.cwd())
    met = notebook.text("%load_ext ring_notebook")
    attached = notebook.error("%ring attach")[1].splitlines()[-1]
    notebook.run("%ring start -n 2")
    print(json.dumps([met, attached, notebook.text(CELL)]), flush=True)  # noqa: T201
    if sys.argv[1] == "stopped":
        notebook.run("%ring stop")
    if sys.argv[1] == "killed":
        os.kill(notebook.pid, signal.SIGKILL)
    notebook.close()


if __name__ == "__main__":
    main()
