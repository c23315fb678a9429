"""The soak, shortened: random operations with random trouble over MPI's own launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.programs import ran

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_soak() -> None:
    """Every rank reaches the end, having met trouble, with nothing left over."""
    ringrun = Path(sys.executable).with_name("ringrun")
    done = ran(
        [str(ringrun), "-np", "3", sys.executable, "benchmarks/soak.py", "--operations", "2000"], cwd=ROOT, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"rank (\d): (\{.*?\}) in", done.stdout)
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2"]
    assert all("'clean'" in counts and "'CollectiveAborted'" in counts for _, counts in lines)
