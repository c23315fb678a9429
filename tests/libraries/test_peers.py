"""What other libraries' own tests, and programs of them, give on backend "ring" and on Gloo: the table of the page.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.doc_tables import table
from harness.programs import RINGRUN, ran
from libraries.programs import PEERS, SCRIPTS
from ring_notebook.frameworks.torch_hints import TORCH

LIMIT = 1200
"""Seconds for all on a backend, on a busy machine; alone they take three minutes."""
pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="in an environment of its own: make test-libraries"),
    pytest.mark.timeout(LIMIT),
]
PROGRAM = Path(__file__).with_name("peer.py")
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
NAMES = [*SCRIPTS, *PEERS]


def test_training_arguments_of_trl_are_known() -> None:
    """A cell that makes some finds the ranks of its own run: what accelerate keeps for the life of a process goes."""
    trl, transformers = import_module("trl"), import_module("transformers")
    kinds = (getattr(trl, name) for name in dir(trl) if name.endswith("Config"))
    arguments = {one.__name__ for one in kinds if issubclass(one, transformers.TrainingArguments)}
    assert arguments - set(TORCH.before) == set()
    assert len(arguments) > 4


@cache
def outcomes(backend: str) -> dict[str, str]:
    """By name: nothing, or the end of the output of the job in which it failed. One job runs all that pass."""
    found: dict[str, str] = {}
    while left := NAMES[len(found) :]:
        with TemporaryDirectory() as folder:
            passed = Path(folder, "passed")
            command = [*RINGRUN, "-np", "2", sys.executable]
            done = ran(
                [*command, PROGRAM, backend, passed, *left], timeout=LIMIT, env=os.environ | ENVIRONMENT, cwd=folder
            )
            found |= dict.fromkeys(passed.read_text().splitlines() if passed.exists() else [], "")
        if len(found) < len(NAMES):
            found[NAMES[len(found)]] = done.stderr[-5000:] or "no output"
    return found


@pytest.mark.parametrize("backend", ["ring", "gloo"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_the_page_says(name: str, backend: str) -> None:
    said = {row[0]: row[1 if backend == "ring" else 2] for row in table("distributed.md", "| Of two ranks |")}
    why = outcomes(backend)[name]
    assert ("fails" if why else "passes") == said[name].split(":")[0], why
