"""A notebook in an allocation whose job somebody cancels during a cell: what it says of that."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from notebook.kernel import Notebook

notebook = Notebook(Path(tempfile.mkdtemp()))
notebook.text("%load_ext ring_notebook\n%ring start")
print("status:", notebook.text("%ring status"))  # noqa: T201
cell = "%%ringtrain --background --out run\nimport time\nprint('begun')\ntime.sleep(600)"
notebook.text(cell)
notebook.text("import time\nwhile 'begun' not in str(run.log.view().output): time.sleep(0.1)")
subprocess.run(["scancel", "--me"], check=True)
print("died:", *notebook.error("run.wait()"))  # noqa: T201
print("stopped:", notebook.text("%ring stop"))  # noqa: T201
notebook.close()
