"""A host of a Slurm of four dies in each phase of a job: it is named, and no rank of another. `make test-slurm`."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.slurm import Slurm, missing, slurm
from harness.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

RINGRUN = str(Path(sys.executable).with_name("ringrun"))
RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]
DEAD = "ring-c"
LIMIT = 200.0
"""Seconds: a host is silent for 30, and a busy machine is slow."""
PHASES = {
    "start": (["start", DEAD], "begun"),
    "first sum": (["first", DEAD], "begun"),
    "training": (["train"], "above"),
    "idle": (["sleep"], "above"),
    "elastic": (["elastic"], "above"),
}
"""What the ranks do when the host dies, and what each of them says before."""
WHERE = {"last rank": "ring-a:2,ring-b:1,ring-c:1", "rank 0": "ring-c:1,ring-a:2,ring-b:1"}
"""Whose host it is. `ringrun` is on ring-a."""


@pytest.fixture(scope="module", name="system")
def _system() -> Iterator[Slurm]:
    """Of a login node and three hosts."""
    with slurm(3) as system:
        yield system


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("phase", "whose", "how"), list(itertools.product(PHASES, WHERE, ["cut", "ended"])))
def test_a_host_dies(system: Slurm, tmp_path: Path, phase: str, whose: str, how: str) -> None:
    """Without its power, where nobody hears of it, or so that its connections end."""
    program, begun = PHASES[phase]
    elastic = ["--elastic", "--min-np", "2"] if phase == "elastic" else []
    ringrun = [RINGRUN, "--no-prefix", "-np", "4", "-H", WHERE[whose], *elastic, *RANK, *program]
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\n{shlex.join(ringrun)}\necho exit code $?\n")
    job = system.submit(script, output, "--no-requeue", *(["--no-kill"] if elastic else []))
    try:
        until(lambda: output.exists() and output.read_text().count(begun) >= 4, LIMIT)
        time.sleep(0.5)  # to be in what follows
        system.kill_host(2, cut_first=how == "cut")
        system.wait_until_nothing_is_left(LIMIT)
        said = output.read_text()
    finally:
        system.run(["scancel", job])
        system.revive_host(2)
    ours = "\n".join(re.findall("^ringrun: .*", said, re.MULTILINE))
    print(ours)  # noqa: T201 - pytest -rP shows it
    assert not re.search(r"rank \d on ring-[ab]\b", ours), said
    if elastic:
        assert re.search(rf"^ringrun: rank \d on {DEAD} failed: its host is lost", ours, re.MULTILINE), said
        assert sorted(re.findall(r"ended on (\S+) as one of 3", said)) == ["ring-a", "ring-a", "ring-b"], said
        assert "exit code 0" in said, said
    else:
        lost = rf"Slurm job {job} was ended because it has lost host {DEAD};|rank \d on {DEAD} failed first: "
        assert re.search(lost, ours), said
