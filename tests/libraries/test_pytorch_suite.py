"""PyTorch's own tests of torch.distributed and DistributedDataParallel, those an installed PyTorch has, on four ranks.

What they ask for on a GPU lies in CPU memory (`cpu_devices`). What is left out, and why, says `left_out`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from harness.programs import ringrun
from libraries.left_out import LEFT_OUT

pytest.importorskip("expecttest", reason="lives in an environment of its own: make test-libraries")

RANKS = 4
LIMIT = 1800
"""Seconds for all of them, on a busy machine; alone they take about three minutes."""
PROGRAM = Path(__file__).with_name("pytorch_suite.py")


@pytest.mark.timeout(LIMIT)
def test_on_our_backend(tmp_path: Path) -> None:
    # Ranks compute on one core each, and those that share it with other programs may be late.
    env = os.environ | {"RING_TIMEOUT": "120", "OMP_NUM_THREADS": "1"}
    done = ringrun("-np", str(RANKS), sys.executable, PROGRAM, tmp_path, timeout=LIMIT, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    failed = {
        name: next(report[name][1] for report in reports if report[name][0] == "failed")
        for name in reports[0]
        if any(report[name][0] == "failed" for report in reports)
    }
    assert not failed, "\n\n".join(f"{name}: {why[-1500:]}" for name, why in failed.items())
    passed = [name for name in reports[0] if reports[0][name][0] == "passed"]
    assert len(passed) > 150, sorted(set(reports[0]) - set(passed))
    for pattern in LEFT_OUT:
        assert any(re.search(pattern, name) for name in reports[0]), f"nothing is left out for {pattern}"
