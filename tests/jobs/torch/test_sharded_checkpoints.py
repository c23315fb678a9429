"""Checkpoints that three ranks have written are read by other numbers of them, and outlive a rank that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import programs

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROGRAM = Path(__file__).with_name("sharded_program.py")


def ringrun(ranks: int, kind: str, folder: Path | str, what: str, *options: str) -> subprocess.CompletedProcess[str]:
    folders = filter(None, (str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH")))  # the first one for `harness`
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    program = [sys.executable, "-W", "ignore", PROGRAM, kind, folder, what]
    return programs.ringrun("-np", str(ranks), *options, *program, env=env)


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def samples(done: subprocess.CompletedProcess[str]) -> list[int]:
    """What all ranks have had."""
    lines = [line.removeprefix("samples") for line in done.stdout.splitlines() if line.startswith("samples")]
    return [one for line in lines for one in json.loads(line)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("plain", [(2, "plain"), (1, "plain"), (2, "tensor")]),
        ("tensor", [(2, "tensor"), (1, "tensor"), (2, "fsdp")]),
        ("adapters", [(2, "adapters"), (1, "adapters")]),
        ("fsdp", [(2, "fsdp"), (1, "plain")]),
    ],
)
def test_other_ranks_and_other_shards(tmp_path: Path, kind: str, others: list[tuple[int, str]]) -> None:
    """The same bits of weights and moments, and the samples that are left, each once."""
    done = ringrun(3, kind, tmp_path, "write")
    assert done.returncode == 0, done.stderr
    written = reports(done)
    assert len(written) == 3
    assert len({one["digest"] for one in written}) == 1
    before = samples(done)
    for ranks, then in others:
        done = ringrun(ranks, then, tmp_path, "read")
        assert done.returncode == 0, done.stderr
        assert reports(done) == [written[0]] * ranks, (ranks, then)
        assert sorted(before + samples(done)) == list(range(72)), (ranks, then)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "then"), [("fsdp", 3, 2), ("plain", 3, 2), ("fsdp, background", 4, 2), ("fsdp, background", 2, 4)]
)
def test_a_rank_is_killed_while_it_writes(tmp_path: Path, kind: str, ranks: int, then: int) -> None:
    """The checkpoint before stays whole. The next training continues from it, and removes the broken one."""
    done = ringrun(ranks, kind, tmp_path, "die")
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000003"]
    again = ringrun(then, kind, tmp_path, "read")
    assert again.returncode == 0, again.stderr
    assert reports(again)[0] == reports(done)[0]
    assert sorted(samples(done) + samples(again)) == list(range(72))
    assert ringrun(then, kind, tmp_path, "write").returncode == 0
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.slow
def test_an_elastic_training_goes_on(tmp_path: Path) -> None:
    """Two of three ranks are left, say that the one in the making is lost, and write the next."""
    done = ringrun(3, "plain", tmp_path, "survive", "--elastic")
    assert done.returncode == 0, done.stderr
    assert "ringrun: rank 1 failed: " in done.stderr
    assert "rank 1 has written nothing for 10 s" in done.stderr
    assert done.stderr.count("could not be written") == 1
    assert names(tmp_path) == ["step-00000003", "step-00000009"]
