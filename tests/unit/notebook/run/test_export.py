"""A cell as a script: what stands in it, and what is said of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ring_notebook.errors import RingError
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.export import export


@pytest.fixture
def ran(tmp_path: Path) -> Any:
    def run(name: str, source: str, cluster: str = "c1", status: str = "ok", **options: Any) -> RunLog:
        time.sleep(0.002)  # runs are in order of their time
        log = RunLog(tmp_path / "runs" / name, name, name, 3, source, options, {"cluster": cluster})
        log.finish(status)
        return log

    return run


def test_the_set_up_cells_of_its_cluster_come_first_each_once(ran: Any, tmp_path: Path) -> None:
    ran("a", "of_another_cluster = 1", cluster="c0", setup=True)
    ran("b", "model = 1", setup=True)
    ran("c", "broken = 1 / 0", setup=True, status="failed")
    ran("d", "not_set_up = 1")
    ran("e", "data = 2", setup=True)
    ran("f", "model = 1", setup=True)
    log = ran("g", "loss = model + data")
    ran("h", "later = 1", setup=True)
    made = export(log, tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    assert [line for line in text.splitlines() if " = " in line] == ["model = 1", "data = 2", "loss = model + data"]
    assert "import ring_notebook.torch as ring\n\nring.init()\n" in text
    assert "ringrun -np 3 python train.py" in text
    wrote = f"Wrote 2 set-up cells and the cell of run g to {tmp_path}/train.py."
    assert repr(made) == f"{wrote} Run it: ringrun -np 3 python train.py"


def test_options_of_a_cell_that_change_its_training_are_set_before_it(ran: Any, tmp_path: Path) -> None:
    ran("a", "from __future__ import annotations\ntimes = 1", setup=True, sync_every=1, logical=0)
    ran("b", "model = 2", setup=True, logical=8)
    made = export(ran("c", "loss = model", sync_every=50, logical=0), tmp_path / "train.py")
    run_options = "ring_notebook.core.run_options"
    lines = made.text.splitlines()
    assert [line for line in lines if run_options in line or " = " in line] == [
        "times = 1",
        f"import {run_options}",
        f"{run_options}.of_run.logical = 8  # %%ringtrain --logical 8",
        "model = 2",
        f"import {run_options}",
        f"{run_options}.of_run.sync_every = 50  # %%ringtrain --sync-every 50",
        f"{run_options}.of_run.logical = 0",
        "loss = model",
    ]
    assert made.missing == ()


def test_what_a_cell_had_and_its_script_has_not_is_told(ran: Any, tmp_path: Path) -> None:
    ran("a", "download()", setup=True, ranks=[0])
    made = export(ran("b", "train()", knobs={"lr": 0.05, "wait": 2}, ranks=None), tmp_path / "train.py")
    assert "# %% a, a set-up cell\n# ran on rank 0 only, here on all ranks\ndownload()" in made.text
    assert "# began with lr = 0.05, wait = 2, not in this script\ntrain()" in made.text
    assert "Not as in the notebook: a ran on rank 0 only, here on all ranks; b began with lr = 0.05" in repr(made)


def test_of_an_edited_cell_the_last_version_that_ran_well(ran: Any, tmp_path: Path) -> None:
    for name, source, status, cell in (
        ("a", "seed = 1", "ok", "x"),
        ("b", "data = seed", "ok", "y"),
        ("c", "seed = 2", "ok", "x"),
        ("d", "seed = 1 / 0", "failed", "x"),
        ("e", "loss = dta", "ok", "z"),
    ):
        ran(name, source, status=status, setup=True, cell_id=cell)
    export(ran("f", "loss = data", setup=True, cell_id="z"), tmp_path / "train.py")
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert [line for line in lines if " = " in line] == ["seed = 2", "data = seed", "loss = data"]


def test_names_that_no_cell_makes_are_told(ran: Any, tmp_path: Path) -> None:
    log = ran("a", "import os\ndef f(x): return x\ny = [z for z in f(range(len(os.sep)))]\nring.log(a=model(data))")
    assert export(log, tmp_path / "train.py").missing == ("model", "data")
    assert "No cell of it makes model, data: mark" in repr(export(log, tmp_path / "train.py"))
    star = ran("b", "from math import *\nprint(pi)")
    assert export(star, tmp_path / "star.py").missing == ()
    timed = ran("c", "%time x = 1\n%time jax.jit(x, y)")
    assert set(export(timed, tmp_path / "timed.py").missing) == {"jax", "y"}
    assert "import ring_notebook.jax as ring" in (tmp_path / "timed.py").read_text()


def test_what_ipython_alone_understands_still_runs(ran: Any, tmp_path: Path) -> None:
    log = ran("a", "from __future__ import annotations\n!echo said\n%time x = 1\ndisplay(x)\nx.to('cuda')")
    export(log, tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    assert "get_ipython().system('echo said')" in text
    assert "InteractiveShell.instance(" in text
    assert "from IPython.display import display" in text
    assert "torch.cuda.set_device(ring.local_rank()" in text
    assert text.index("from __future__") < text.index("import ring_notebook")


def test_a_file_of_the_user_s_own_is_left_alone(ran: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('mine')")
    log = ran("a", "x = 1")
    with pytest.raises(RingError, match="was not exported from a notebook"):
        export(log, tmp_path / "train.py")
    export(log, tmp_path / "other.py")
    export(log, tmp_path / "other.py")
