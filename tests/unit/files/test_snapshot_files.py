"""Snapshots of several writers in one folder."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from ring_notebook.files.snapshot_files import Writer, about, found

WRITERS, EACH = 4, 8


def written(folder: Path, writer: int) -> list[str]:
    """The names of the snapshots that `finish` has returned, each of which replaces those of the others."""
    names = []
    for number in range(EACH):
        one = Writer(folder, f"{writer}-{number}", 0, 1)
        one.put(memoryview(b"x" * 100))
        whole = one.finish(b"", about("same"), {"point": 0, "step": 0})
        names += [whole.name] if whole else []
    return names


def test_writers_that_replace_the_same_snapshots_all_have_theirs(tmp_path: Path) -> None:
    with ProcessPoolExecutor(WRITERS, get_context("spawn")) as pool:
        assert [*pool.map(partial(written, tmp_path), range(WRITERS))] == [["same"] * EACH] * WRITERS
    whole, torn = found(tmp_path)
    assert ([one.name for one in whole], torn) == (["same"], [])
    assert [*tmp_path.iterdir()] == [whole[0].path]
