"""Loaders of torchdata, PyG and Hugging Face that `prepare` divides yield, step by step, the samples of one process.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.programs import RINGRUN, ran

pytestmark = pytest.mark.skipif(
    find_spec("torch_geometric") is None, reason="in an environment of its own: make test-libraries"
)
LIMIT = 600
"""Seconds for all, on a busy machine; most of them start workers."""
PROGRAM = Path(__file__).with_name("library_loaders.py")


@pytest.mark.timeout(LIMIT)
def test_steps_have_the_samples_of_one_process(tmp_path: Path) -> None:
    command = [*RINGRUN, "-np", "2", sys.executable, PROGRAM, tmp_path]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = ran(command, timeout=LIMIT, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    wrong = {name: why for name in reports[0] if (why := reports[0][name] or reports[1][name])}
    assert not wrong, "\n\n".join(f"{name}: {why[-1500:]}" for name, why in wrong.items())
    assert len(reports[0]) > 30
