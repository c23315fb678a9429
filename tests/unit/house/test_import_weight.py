"""What importing the package costs: nothing heavy is loaded until it is used."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from harness.programs import ran

KERNEL_SIDE = ["ipyparallel", "ipywidgets", "ipecharts"]
SHARDED = "torch.distributed.tensor"  # a third of the time in which torch and ours are imported
HEAVY = ["torch", SHARDED, *KERNEL_SIDE, "mpi4py", "numpy", "IPython", "ring_notebook._core"]


def loaded_after(*parts: str) -> list[set[str]]:
    """Which of HEAVY a fresh Python has loaded after each of these parts of a program."""
    ask = f"import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = ran([sys.executable, "-c", "\n".join(f"{part}\n{ask}" for part in parts)], check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_what_is_light_loads_nothing_heavy() -> None:
    """The package, what each process of a job imports, and a public name that needs little."""
    rooms = ("config", "errors", "protocol.records", "launch.supervisor.rank_wrapper", "launch.cli")
    light = ["import ring_notebook", *(f"import ring_notebook.{room}" for room in rooms), "ring_notebook.run"]
    *found, heavy = loaded_after(*light, "ring_notebook.Cluster")
    assert {part: names for part, names in zip(light, found, strict=True) if names} == {}
    assert "ipyparallel" in heavy


def test_an_unknown_name_is_an_attribute_error() -> None:
    import ring_notebook

    with pytest.raises(AttributeError, match=r"ring_notebook.*no attribute '__nothing__'"):
        _ = ring_notebook.__nothing__
    assert set(dir(ring_notebook)) == set(ring_notebook.__all__)


def test_rank_side_loads_neither_the_kernel_side_nor_what_few_trainings_use() -> None:
    (loaded,) = loaded_after("import ring_notebook.torch")
    assert not loaded & {*KERNEL_SIDE, SHARDED}


@pytest.mark.parametrize("face", ["torch", "torch.mpi_ops", "torch.elastic", "tensorflow", "keras", "jax"])
def test_public_names_of_a_face_are_read_from_its_source(face: str) -> None:
    """Without them, ``ring.`` completes what its ``__init__`` happens to import. Torch is there to compare."""
    from ring_notebook.notebook.magics.completion import _public_names

    names = _public_names(f"ring_notebook.{face}")
    assert names, "completion does not understand how __all__ is made: see _public_names()"
    if face.startswith("torch"):
        assert {*names} == {*import_module(f"ring_notebook.{face}").__all__}


COMPLETES = """
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ring_notebook")
for cell in CELLS:
    with provisionalcompleter():
        print(*(one.text for one in shell.Completer.completions(cell, len(cell))))
"""


@pytest.mark.slow
def test_names_of_the_ranks_are_completed_without_their_framework() -> None:
    """Before a cluster has started. As many names as after the import, which takes longer than a front end waits."""
    import ring_notebook.torch as face

    cells = ["ring.", "%%ringtrain\nring.elastic.", "%%ringtrain\nx = ring.prepare(1)\nx."]
    ask = f"{COMPLETES.replace('CELLS', repr(cells))}\nimport sys; print(*{{'torch', 'IPython'}} & sys.modules.keys())"
    done = ran([sys.executable, "-c", ask], check=True)
    ring, elastic, _, loaded = done.stdout.splitlines()
    assert loaded == "IPython"
    assert set(ring.split()) == set(face.__all__)
    assert set(elastic.split()) == set(face.elastic.__all__)


PANEL = """
import contextlib, io, tempfile, time
from array import array
from pathlib import Path
from ring_notebook.notebook.panel.panel import PERIOD, Panel
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.protocol.records import MetricBatch, encode
def show(rows):
    log = RunLog(Path(tempfile.mkdtemp()), "r1", "", 1, "", {}, {})
    log.put(encode([MetricBatch("r1", 0, ("loss",), array("d", rows))]))
    panel = Panel(log)
    with contextlib.redirect_stdout(io.StringIO()):
        panel.show()
        time.sleep(2 * PERIOD)
        panel.close()
    log.finish("ok")
show([])
"""


def test_the_panel_of_a_run_without_metrics_does_not_load_what_draws_charts() -> None:
    without, with_rows = loaded_after(PANEL, "show([1, 1, 0.5, 2, 2, 0.25])")
    assert ("ipecharts" in without, "ipecharts" in with_rows) == (False, True)
