"""Ranks join a real job, where there are slots and in place of those that have died; it trains as one process would."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

from elastic.test_dying import reports_of, ringrun

PROGRAM = str(Path(__file__).with_name("growing.py"))


def check(done: subprocess.CompletedProcess[str], size: int) -> list[dict[str, object]]:
    """All ranks of the end have trained through the whole epoch, as one process would have; returns what they say."""
    reports = reports_of(done)
    assert [report["job_rank"] for report in reports] == list(range(size)), done.stderr
    assert sorted(report["rank"] for report in reports) == list(range(size))
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    seen = reports[0]["seen"]
    assert sorted(seen) == list(range(48)), "each sample of the epoch once, in spite of all"
    for at in range(0, 48, size):
        optimizer.zero_grad()
        (sum((model(data[index]) - 1.0).square().sum() for index in seen[at : at + size]) / size).backward()
        optimizer.step()
    for report in reports:
        assert report["seen"] == seen
        torch.testing.assert_close(torch.tensor(report["weight"]), model.weight, rtol=1e-5, atol=1e-6)
    return reports


def test_a_job_grows_and_takes_in_who_comes_for_the_dead() -> None:
    """Rank 2 joins two others, which die; it has the state, waits for two more, and is the first of them."""
    options = ["--min-np", "2", "--max-np", "3", "-H", "localhost:4", "-np", "2"]
    done = ringrun(*options, "python", PROGRAM, "3", "0,1")
    reports = check(done, 3)
    assert [report["joined"] for report in reports] == [True] * 3
    assert reports[2]["rank"] == 0
    assert [start for start in reports[2]["starts"] if start[0] < 3] in ([], [[1, 6]], [[2, 6]]), reports[2]["starts"]
    assert "ringrun: rank 2 has joined. Continuing with 3 ranks\n" in done.stderr
    fewer = "1 rank of 3 left, fewer than the 2 of --min-np; waiting 600 s for others to join"
    # The kernel may have killed a process of another test for lack of memory: its count is of the machine.
    assert re.search(rf"killed by SIGKILL, (not|probably) out of memory\. {re.escape(fewer)}\n", done.stderr)
    assert done.stderr.count("has joined") == 3
