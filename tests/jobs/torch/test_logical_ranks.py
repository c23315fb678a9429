"""The same bits on any number of ranks: losses, weights, optimizer state, buffers and what comes after."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import programs

pytestmark = pytest.mark.usefixtures("forked_ranks")
CASES = [
    "mlp-sgd-generator",
    "mlp-adam-workers",
    "resnet-sgd-bf16",
    "resnet-adamw-clip",
    "gpt-adamw-clip",
    "mlp-fused-scaler-clip",
    "mlp-sgd-twice",
    "two",
    "alone",
]
COMPARED = ["exact-sgd", "exact-adam-clip", "exact-sgd-twice", "two"]


def ringrun(ranks: int, program: str, *arguments: object) -> None:
    """Run a program of this folder."""
    path = Path(__file__).with_name(program)
    job = ["-np", str(ranks), sys.executable, "-W", "ignore", path, *map(str, arguments)]
    done = programs.ringrun(*job, timeout=600)
    assert done.returncode == 0, done.stderr


def train(ranks: int, logical: int, steps: int, folder: Path, cases: list[str]) -> Any:
    """What a job of so many ranks has computed in each case; ``logical`` 0: without logical ranks."""
    path = folder / f"{ranks} ranks, {logical} logical, {steps} steps"
    ringrun(ranks, "logical_program.py", path, logical, steps, *cases)
    return json.loads(path.read_text())


def differing(one: Any, other: Any) -> list[str]:
    return [f"{case}: {what}" for case in one for what in one[case] if one[case][what] != other[case][what]]


@pytest.mark.slow
def test_four_on_one_and_three_ranks(tmp_path: Path) -> None:
    first, *others = [train(ranks, 4, 8, tmp_path, ["resnet-adamw-clip", "gpt-adamw-clip"]) for ranks in (1, 3)]
    assert all(len(losses) >= 8 for case in first.values() for _, losses in case["losses"])
    assert all(len(case["losses"]) == 4 for case in first.values())
    for other in others:
        assert differing(first, other) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_number_of_ranks(tmp_path: Path) -> None:
    first, *others = [train(ranks, 4, 20, tmp_path, CASES) for ranks in (1, 2, 4)]
    assert first["mlp-fused-scaler-clip"]["scale"] == 4096 / 2 * 2**7  # an overflow, then 22 of 24 steps
    for other in others:
        assert differing(first, other) == []


@pytest.mark.slow
def test_as_without_logical_ranks(tmp_path: Path) -> None:
    """But for rounding: where nothing is random, four logical ranks on two compute what four ranks do."""
    in_turns, plain = train(2, 4, 8, tmp_path, COMPARED), train(4, 0, 8, tmp_path, COMPARED)
    for case in COMPARED:
        for (rank, losses), (of, others) in zip(in_turns[case]["losses"], plain[case]["losses"], strict=True):
            assert rank == of
            values = [[float.fromhex(one) for one in row] for row in (losses, others)]
            assert values[0] == pytest.approx(values[1], rel=1e-3), (case, rank)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_goes_on_with_the_same_bits_on_other_ranks(tmp_path: Path) -> None:
    """Between two epochs, and in the middle of one."""

    def computed(ranks: int, folder: str) -> Any:
        ringrun(ranks, "logical_resume.py", tmp_path / "computed", tmp_path / folder, "1000 steps", -1)
        return json.loads((tmp_path / "computed").read_text())

    whole = computed(1, "whole")
    assert whole["steps"] == 24
    assert len(whole["losses"]) == 4
    for first, then, every, leaves_after in ((2, 1, "5 steps", 5), (1, 4, "epoch", 8), (4, 2, "3 steps", 13)):
        folder = f"from {first} to {then} ranks"
        ringrun(first, "logical_resume.py", tmp_path / "nothing", tmp_path / folder, every, leaves_after)
        assert computed(then, folder) == whole, folder
    assert not (tmp_path / "nothing").exists()
