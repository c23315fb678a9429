"""Adapters of peft, quantized weights and 8-bit optimizers under `prepare`: one job of two ranks runs all that pass.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import ast
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.programs import RINGRUN, ran

LIMIT = 900
"""Seconds for all of them, on a busy machine."""
pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="in an environment of its own: make test-libraries"),
    pytest.mark.timeout(LIMIT),
]
PROGRAM = Path(__file__).with_name("adapters.py")
NAMES = [
    name.id
    for node in ast.walk(ast.parse(PROGRAM.read_text()))
    if isinstance(node, ast.DictComp) and isinstance(node.generators[0].iter, ast.Tuple)
    for name in node.generators[0].iter.elts
    if isinstance(name, ast.Name)
]
"""Its cases. It is not imported here: the libraries take seconds."""


@cache
def outcomes() -> dict[str, str]:
    """By name: nothing, or the end of the output of the job in which it failed."""
    found: dict[str, str] = {}
    while left := NAMES[len(found) :]:
        with TemporaryDirectory() as folder:
            passed = Path(folder, "passed")
            command = [*RINGRUN, "--no-prefix", "-np", "2", sys.executable]
            done = ran(
                [*command, PROGRAM, passed, *left], timeout=LIMIT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=folder
            )
            found |= dict.fromkeys(passed.read_text().splitlines() if passed.exists() else [], "")
        if len(found) < len(NAMES):
            found[NAMES[len(found)]] = done.stderr[-5000:] or "no output"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_as_on_one_process(name: str) -> None:
    assert not outcomes()[name]
