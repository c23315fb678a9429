"""A sweep: one cell with several values of its constants, on parts of the cluster side by side."""

from __future__ import annotations

import re
from pathlib import Path

from notebook.kernel import Notebook

CELL = """
lr, seed = 1.0, 7
import pathlib
from ring_notebook.core.metrics import log
if lr == 0.5 and not pathlib.Path({mended!r}).exists():
    raise ValueError(f"too large: {{seed}}")
for i in range(3):
    log(loss=(lr + seed) / (i + 1))
"""


def test_a_sweep_runs_side_by_side_and_resumes(notebook: Notebook, tmp_path: Path) -> None:
    cell = CELL.format(mended=str(tmp_path / "mended"))
    line = "%%ringtrain -n 1 --name s --sweep lr=0.1,0.5 --sweep seed=0..1 --out swept"
    (shown,) = notebook.run(f"{line}{cell}")
    page = shown["data"]["text/html"]
    assert re.findall("<img alt='([^:]+):", page) == ["loss over step"]
    # Whole, and each once: a column of the table is cut where it is wide, and where the page is narrow.
    assert page.count("too large") == 2
    for seed in range(2):
        assert f"<p>lr=0.5 seed={seed}: ValueError: too large: {seed} (rank 0, line 6)</p>" in page
    text = "print([(one.title, one.status) for one in swept.trials])"
    titles = [f"s lr={lr} seed={seed}" for lr in (0.1, 0.5) for seed in (0, 1)]
    assert notebook.text(text).strip() == repr(list(zip(titles, ["ok", "ok", "failed", "failed"], strict=True)))
    assert notebook.text("[one.view().ranks[0].last['loss'] > 0.3 for one in swept.runs[:2]]") == "[False, True]"
    assert notebook.text("sorted({tuple(one.environment['ranks']) for one in swept.runs})") == "[(0,), (1,)]"
    assert "lr, seed = 0.5, 1" in notebook.text("print(swept.runs[3].source)")
    notebook.text("before = [one.run for one in swept.runs]")

    (tmp_path / "mended").touch()
    notebook.run(f"{line} --resume{cell}")
    assert notebook.text("{one.status for one in swept.trials}") == "{'ok'}"
    assert notebook.text("[one.run == run for one, run in zip(swept.runs, before)]") == "[True, True, False, False]"
    assert "the cell has no constant 'momentum'" in notebook.error(f"%%ringtrain --sweep momentum=0.9{cell}")[1]
    assert "at most 1000 runs" in notebook.error(f"%%ringtrain --sweep lr=0..99 --sweep seed=0..99{cell}")[1]
    assert "lr twice" in notebook.error(f"%%ringtrain --sweep lr=0.1 --sweep lr=0.2{cell}")[1]
    assert "cannot be combined with --background" in notebook.error(f"%%ringtrain --background --sweep lr=1{cell}")[1]


def test_a_stop_ends_all_of_a_sweep(notebook: Notebook, tmp_path: Path) -> None:
    cell = f"lr = 1\nopen({str(tmp_path / 'begun')!r} + str(lr), 'w').close()\nimport time\ntime.sleep(60)"
    begun = [tmp_path / f"begun{lr}" for lr in (1, 2)]
    line = "%%ringtrain -n 1 --sweep lr=1,2,3,4 --out swept"
    name, text = notebook.error(f"{line}\n{cell}", lambda: all(one.exists() for one in begun))
    assert (name, "the sweep was stopped" in text) == ("KeyboardInterrupt", True)
    statuses = notebook.text("[one.status for one in swept.trials]")
    assert statuses == "['interrupted', 'interrupted', 'not begun', 'not begun']"
    assert notebook.text("%%ringtrain\nprint('idle')").count("idle") > 0


def test_stop_of_a_sweep_is_pressed_while_its_cell_blocks(notebook: Notebook) -> None:
    press = """
import threading, time, ipywidgets
def press():
    while not any(one.status == "running" for one in swept.trials):
        time.sleep(0.05)
    widgets = ipywidgets.widgets.widget._instances.values()
    [button] = [one for one in widgets if "of the sweep" in (getattr(one, "tooltip", "") or "")]
    button.click()
    seen.append(button.description)
swept, seen = type("", (), {"trials": ()})(), []
threading.Thread(target=press, daemon=True).start()
"""
    notebook.run(press)
    name, text = notebook.error("%%ringtrain --sweep lr=1,2 --out swept\nlr = 0\nimport time\ntime.sleep(60)")
    assert (name, "the sweep was stopped" in text) == ("KeyboardInterrupt", True)
    assert (
        notebook.text("[one.status for one in swept.trials], seen") == "(['interrupted', 'not begun'], ['Stopping…'])"
    )


def test_a_sweep_of_which_nothing_ends_well_raises_what_the_first_run_did(notebook: Notebook) -> None:
    name, text = notebook.error("%%ringtrain --out swept --sweep lr=1000.0,2\nlr = 0\nassert lr < 1, lr")
    assert (name, "AssertionError: 1000.0" in text) == ("AssertionError", True)
    # The table writes no other number than legend and names of runs.
    assert notebook.text("[one.title for one in swept.trials]") == "['sweep lr=1000', 'sweep lr=2']"
