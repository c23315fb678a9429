"""Which rank the notebook names when its cluster has died."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ring_notebook.launch.supervisor.rank_failure import RankFailure
from ring_notebook.notebook.cluster.ranks.death import explain


def test_a_rank_that_others_have_aborted_is_not_named(tmp_path: Path) -> None:
    """Whatever the clocks of two hosts say: the notebook blames as ringrun does."""
    failures = [RankFailure(0, "a", 1, 1.0, aborted=True), RankFailure(3, "b", -9, 2.0)]
    output = "".join(f"\x1e{json.dumps(asdict(failure))}\x1e\n" for failure in failures)
    assert explain("engines", output, tmp_path).rank == 3
