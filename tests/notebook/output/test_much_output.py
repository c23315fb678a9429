"""Very much output of a rank: all of it reaches the disk, and the notebook's process stays small."""

from __future__ import annotations

import resource

import pytest

from ring_notebook.notebook.cluster.cluster import Cluster

MEGABYTES = 100


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.slow
def test_a_hundred_megabytes(cluster: Cluster) -> None:
    cluster.run("print('x')").wait()
    before = peak()
    run = cluster.run(f"if ring.rank() == 0: print(('x' * 999_999 + chr(10)) * {MEGABYTES}, end='')").wait()
    assert sum(len(piece.text) for piece in run.log.output()) == MEGABYTES * 1_000_000
    assert peak() - before < 3 * MEGABYTES


def test_text_that_cannot_be_encoded(cluster: Cluster) -> None:
    run = cluster.run("print('bad \\ud800 text')").wait()
    assert {piece.text for piece in run.log.view().output} == {"bad \\ud800 text\n"}
