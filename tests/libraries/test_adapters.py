"""Adapters of peft, quantized weights and 8-bit optimizers under `prepare`, as on one process.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.case_jobs import cases, check, of_a_job

PROGRAM = Path(__file__).with_name("adapters.py")


@pytest.mark.skipif(find_spec("peft") is None, reason="in an environment of its own: make test-libraries")
@of_a_job
@pytest.mark.parametrize("case", cases(PROGRAM))
def test_it_is_as_on_one_process(case: str) -> None:
    check(PROGRAM, case, 2, HF_HUB_OFFLINE="1")
