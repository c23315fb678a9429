"""Each process of a job over two hosts is killed at each moment: words, exit code, who goes on, and what is left."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.two_hosts import NAMES, TwoHosts
from hosts.test_over_ssh import assert_nothing_is_left

PROGRAM = str(Path(__file__).with_name("killed.py"))
LIMIT = 120.0
"""Seconds until a job counts as stuck."""
WHO = ["0", "3", "agent", "supervisor"]
WHEN = ["start", "collective", "between", "end"]
KINDS = ["plain", "elastic"]
ORDINARY = [("agent", "collective", "elastic"), ("0", "start", "elastic"), ("3", "end", "plain")]
"""Those that the ordinary tests try."""


def cells() -> list[object]:
    return [
        pytest.param(*cell, marks=[] if cell in ORDINARY else [pytest.mark.slow])
        for cell in itertools.product(WHO, WHEN, KINDS)
    ]


def run(hosts: TwoHosts, *arguments: str) -> subprocess.CompletedProcess[str]:
    elastic = ["--elastic"] if arguments[-1] == "elastic" else []
    where = f"{NAMES[0]}:2,{NAMES[1]}:2"
    ringrun = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", *elastic, "-np", "4", "-H", where]
    return subprocess.run(
        [str(hosts.folder / "launcher"), NAMES[0], shlex.join([*ringrun, "python", PROGRAM, *arguments])],
        env={**os.environ, **hosts.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(("who", "when", "kind"), cells())
def test_a_process_is_killed(hosts: TwoHosts, who: str, when: str, kind: str) -> None:
    done = run(hosts, who, when, kind)
    dead = {"agent": [2, 3], "supervisor": [0, 1, 2, 3]}.get(who) or [int(who)]
    ended = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    goes_on = kind == "elastic" and when != "start" and who != "supervisor"
    if goes_on:
        living = [rank for rank in range(4) if rank not in dead]
        size = 4 if when == "end" else len(living)
        assert ended == [f"rank {rank} of 4 ended as one of {size}" for rank in living], done.stderr
        assert done.returncode == 0, done.stderr
        for rank in dead:
            assert f"ringrun: rank {rank} failed: " in done.stderr
    else:
        if when != "end":  # at the end the others may have ended before
            assert ended == [], done.stderr
        assert done.returncode == (1 if who == "agent" else 137), done.stderr
        lost = {
            "agent": "rank [23] on .* failed first: its host is lost",
            "supervisor": "the launcher of the ranks failed",
        }
        words = lost.get(who) or f"rank {who} on {NAMES[int(who) // 2]} failed first: killed by SIGKILL"
        assert re.search(words, done.stderr), done.stderr
    assert_nothing_is_left(hosts)
