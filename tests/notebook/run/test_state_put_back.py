"""What a cell that does not end well leaves changed in the interpreter and in torch is put back, and a line says so."""

from __future__ import annotations

from harness.waiting import until
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.run.run import Run

LEAVES = """
import os, shutil, signal, sys, tempfile, warnings
import torch
kept = warnings.catch_warnings()
kept.__enter__()
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "of a library")
inference = torch.inference_mode()
inference.__enter__()
torch.autocast("cpu").__enter__()
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.autograd.set_detect_anomaly(True)
gone = tempfile.mkdtemp()
before = os.getcwd()
os.chdir(gone)
shutil.rmtree(gone)
signal.signal(signal.SIGUSR2, lambda *_: None)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.5)
sys.settrace(lambda *_: None)
"""
IS_AS_BEFORE = """
import time
layer = torch.nn.Linear(2, 1)
layer(torch.ones(1, 2)).sum().backward()
assert layer.weight.grad.dtype == torch.float32 and layer.weight.device.type == "cpu"
assert not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
assert torch.autocast_increment_nesting() == 1
torch.autocast_decrement_nesting()
assert not torch.are_deterministic_algorithms_enabled() and not torch.is_anomaly_enabled()
assert os.getcwd() == before
assert sys.gettrace() is None
assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
warnings.warn("is no error")
time.sleep(0.6)  # the alarm does not come
"""
PUT_BACK = (
    "Put back, because the cell did not end well: the trace function, handlers of SIGUSR2, SIGALRM, the warnings "
    "filters, the current folder, which is gone ({} now), inference mode, autocast, the default dtype, "
    "the default device, deterministic mode, anomaly detection"
)


def ended(run: Run) -> Run:
    until(lambda: run.done)
    return run


def said(run: Run) -> list[str]:
    return sorted(line for piece in run.view.output if piece.stream == "stderr" for line in piece.text.splitlines())


def test_after_a_cell_that_raises(cluster: Cluster) -> None:
    failed = ended(cluster.run(f"{LEAVES}ring.barrier()\nraise ValueError('of the cell')"))
    assert isinstance(failed.error, ValueError)
    before = cluster.pull("before")
    line = PUT_BACK.format(before)
    assert [one.replace("SIGALRM, SIGUSR2", "SIGUSR2, SIGALRM") for one in said(failed)] == [line, line]
    well = ended(cluster.run(IS_AS_BEFORE))
    assert well.status == "ok", well.error
    assert all(one.endswith("UserWarning: is no error") or "warnings.warn" in one for one in said(well)), said(well)


def test_after_an_interrupt_between_two_lines_of_a_library(cluster: Cluster) -> None:
    """As within an optimizer's step: the mode is off, and the block that would put it back has not begun."""
    run = cluster.run("import time, torch\ntorch.set_grad_enabled(False)\nwhile True: time.sleep(0.01)")
    until(lambda: [status.line for status in run.log.statuses().values()] == [3, 3])
    assert run.stop()
    assert run.status == "interrupted"
    assert said(run) == ["Put back, because the cell did not end well: grad mode"] * 2
    assert ended(cluster.run("assert torch.is_grad_enabled()")).status == "ok"


def test_what_a_good_cell_sets_stays(cluster: Cluster) -> None:
    assert ended(cluster.run("import torch\ntorch.set_default_dtype(torch.float64)")).status == "ok"
    failed = ended(cluster.run("import warnings\nwarnings.filterwarnings('ignore', 'of a library')\n1 / 0"))
    assert said(failed) == []
    checks = "assert warnings.filters[0][1].match('of a library')\nassert torch.get_default_dtype() == torch.float64"
    undo = "warnings.filters.pop(0)\ntorch.set_default_dtype(torch.float32)"
    assert ended(cluster.run(f"{checks}\n{undo}")).status == "ok"


def test_threads_start_after_a_cell_that_has_taken_the_hook_of_exceptions_away(cluster: Cluster) -> None:
    assert ended(cluster.run("import sys\nsys.excepthook = None")).status == "ok"
    after = ended(cluster.run("import threading\nassert sys.excepthook\nthreading.Thread(target=int).start()"))
    assert after.status == "ok", after.error
