"""A notebook without a browser: a cluster starts, a cell runs on it, the cluster stops."""

import sys

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ring_notebook")
shell.run_line_magic("ring", "start -n 2")
shell.run_cell_magic(
    "ringtrain",
    "--out run",
    "from ring_notebook.api import basics\n"
    "from ring_notebook.api.objects import allgather_object\n"
    "print(allgather_object(basics.rank()), basics.local_size())",
)
shell.run_line_magic("ring", "stop")
run = shell.user_ns["run"]
sys.stdout.write(f"cell {run.status} {[one['text'] for one in run.state()['output']]}\n")
