"""A notebook in an allocation: starts a cluster over its hosts and trains; ends as a kernel that is closed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from notebook.kernel import Notebook

notebook = Notebook(Path(tempfile.mkdtemp()))
print(notebook.text("%load_ext ring_notebook\n%ring start"))  # noqa: T201
print(  # noqa: T201
    notebook.text(
        "%%ringtrain\nimport socket, torch\ntotal = float(ring.allreduce(torch.ones(1), op=ring.Sum))\n"
        "host = socket.gethostname()"
    )
)
print(notebook.text("%ring pull total\nprint('sum', total)"))  # noqa: T201
print(notebook.text("%ring status"))  # noqa: T201
notebook.close()
