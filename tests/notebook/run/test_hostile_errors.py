"""Exceptions that resist being shown: the run fails with their class, rank and line, and the next one works."""

from __future__ import annotations

import pytest

from notebook.kernel import Notebook
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster

EXCEPTIONS = {
    "exits when it is unpickled": "def __reduce__(self): return (exec, ('raise SystemExit(3)',))",
    "interrupts when it is unpickled": "def __reduce__(self): return (exec, ('raise KeyboardInterrupt',))",
    "hangs when it is unpickled": "def __reduce__(self): return (exec, ('import time; time.sleep(30)',))",
    "exits when it is pickled": "def __reduce__(self): raise SystemExit(3)",
    "has a __str__ that raises": "def __str__(self): raise ValueError('no')",
    "has a __str__ that exits": "def __str__(self): raise SystemExit(3)",
    "has a __str__ that returns no string": "def __str__(self): return 3",
    "has a message of surrogates": "def __str__(self): return 'bad \\ud800'",
    "has a message of 50 MB": "def __str__(self): return 'x' * 50_000_000",
    "has a __repr__ that raises": "def __repr__(self): raise ValueError('no')",
    "is false": "def __bool__(self): return False",
    "refuses attributes": "def __setattr__(self, name, value): raise AttributeError(name)",
}


def shown(error: BaseException) -> str:
    return "\n".join(error._render_traceback_())  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", EXCEPTIONS)
def test_an_exception_that(cluster: Cluster, what: str) -> None:
    run = cluster.run(
        f"class Hostile(Exception):\n    {EXCEPTIONS[what]}\n"
        "if ring.rank() == 1:\n    raise Hostile('text')\n"
        "ring.barrier()"
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its class is the cell's
        run.wait()
    assert type(caught.value).__name__ == "Hostile"
    text = shown(caught.value)
    assert "Cell, line 4" in text
    assert "raised on rank 1" in text
    assert len(text.encode()) < 50_000
    assert len(str(caught.value).encode()) < 50_000
    assert run.summary["status"] == run.status == "failed"
    assert cluster.run("ring.barrier()").wait().status == "ok"


@pytest.mark.parametrize(
    ("cell", "name", "text"),
    [
        (
            "%%ringtrain\nprint(1)",
            "CellSyntaxError",
            "%%ringtrain within a cell that runs on the ranks; remove its line",
        ),
        ("get_ipython().run_cell_magic('nothing', '', 'x')", "UsageError", "Cell magic `%%nothing` not found"),
        ("exec('x = = 3')", "SyntaxError", "Cell, line 2"),
        ("return 3", "CellSyntaxError", "'return' outside function"),
        ("raise IndentationError('mine')", "IndentationError", "Cell, line 2"),
        ("raise SystemExit(3)", "RunFailed", "SystemExit: 3"),
        ("import sys; sys.exit(3)", "RunFailed", "SystemExit: 3"),
    ],
)
def test_what_ipython_shows_in_its_own_way_fails_the_cell(notebook: Notebook, cell: str, name: str, text: str) -> None:
    shown_name, shown_text = notebook.error(f"%%ringtrain\n{cell}")
    assert shown_name == name
    assert text in shown_text
    assert "ring_notebook/" not in shown_text
    notebook.text("%%ringtrain\npass")


def test_our_own_errors_show_no_frame_of_ours_and_their_table_once(cluster: Cluster) -> None:
    run = cluster.run("import torch\nring.allreduce(torch.ones(3 + ring.rank()), name='w')")
    with pytest.raises(CollectiveMismatch) as caught:
        run.wait()
    text = shown(caught.value)
    assert "Cell, line 2, in <module>" in text
    assert "ring_notebook/" not in text
    assert text.count("The calls at sequence") == 1


def test_a_rank_that_leaves_early_is_told_with_counts(cluster: Cluster) -> None:
    cell = "for i in range(11 if ring.rank() == 0 else 10):\n    ring.allreduce(torch.ones(1))"
    with pytest.raises(CollectiveAborted) as caught:
        cluster.run(cell).wait()
    assert "11 calls on rank 0, 10 on rank 1; they part at line 2" in shown(caught.value)
