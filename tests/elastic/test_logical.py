"""An elastic job of logical ranks shrinks and grows, and computes the same bits as one that nothing disturbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.test_dying import ringrun

PROGRAM = str(Path(__file__).with_name("logical.py"))


def train(path: Path, options: str, *arguments: str) -> tuple[dict[str, Any], list[int]]:
    """What the job has computed, and the numbers of ranks that its rank 0 at the end has trained with."""
    done = ringrun("--elastic", *options.split(), "python", PROGRAM, str(path), *arguments)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    return content["computed"], content["sizes"]


@pytest.mark.slow
def test_a_job_that_shrinks_from_four_to_one_and_one_that_grows(tmp_path: Path) -> None:
    alone, _ = train(tmp_path / "alone", "-np 1", "4", "1")
    assert len(alone["losses"]) == 4
    shrunk, sizes = train(tmp_path / "shrunk", "-np 4", "4", "1", "3:2,3", "9:1")
    assert (sizes[0], sizes[-1]) == (4, 1), sizes
    assert 2 in sizes
    assert shrunk == alone
    grown, sizes = train(tmp_path / "grown", "--max-np 3 -H localhost:4 -np 1", "4", "3")
    assert (sizes[0], sizes[-1]) == (1, 3), sizes
    assert grown == alone


@pytest.mark.slow
def test_eight_on_numbers_that_do_not_divide_them_and_ranks_that_come_for_the_dead(tmp_path: Path) -> None:
    alone, _ = train(tmp_path / "alone", "-np 2", "8", "1")
    shrunk, sizes = train(tmp_path / "shrunk", "-np 4", "8", "1", "3:0")
    assert sizes[-1] == 3, sizes
    assert shrunk == alone
    again, sizes = train(tmp_path / "again", "--max-np 3 -H localhost:4 -np 3", "8", "3", "3:0,1")
    assert sizes[-1] == 3, sizes
    assert again == alone
