"""What uses a private name of torch works, as plainly as it may, with a torch that does not have the name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran
from ring_notebook.torch_private import PRIVATE_NAMES, private

PROGRAM = Path(__file__).with_name("private_names_program.py")


def run(*absent: str) -> subprocess.CompletedProcess[str]:
    ringrun = [*RINGRUN, "-np", "2"]
    return ran([*ringrun, sys.executable, str(PROGRAM), *absent], timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize(
    "absent",
    [pytest.param([*PRIVATE_NAMES], id="all"), *(pytest.param([name], id=name) for name in PRIVATE_NAMES)],
)
def test_without(absent: list[str]) -> None:
    done = run(*absent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2


def test_a_name_that_is_there_is_found() -> None:
    import torch

    assert private("current_graph_task") is torch._C._current_graph_task_id


def test_a_name_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("torch.not_there:name", "torch:not_there", "torch.nn:Module.not_there"):
        monkeypatch.setitem(PRIVATE_NAMES, "copy_each", place)
        assert private("copy_each") is None
