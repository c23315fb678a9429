"""Cases that need a framework of their own: functions ``case_*`` of a file, executed by all ranks of one job.

The file imports its framework; the tests only read its names. One job runs all cases of a file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import pytest

from harness.programs import RINGRUN

TESTS = Path(__file__).resolve().parents[1]
CASE_LIMIT = 200.0
"""Seconds in which some case must end, or the job is killed; frameworks are imported on a busy machine."""
of_a_job = pytest.mark.timeout(0)
"""For tests that call `check`: the first one waits for all cases of its job."""


def cases(path: Path) -> list[str]:
    """The names of the cases in a file, in its order."""
    nodes = ast.parse(path.read_text()).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


def check(path: Path, case: str, size: int, **variables: str) -> None:
    """Fail if ``case`` failed on any of ``size`` ranks in the job with these environment variables."""
    outcomes, output = _job(path, size, tuple(sorted(variables.items())))
    if case not in outcomes:
        pytest.fail(f"the job has not come to {case}:\n{output}")
    if outcomes[case]:
        pytest.fail(outcomes[case])


@lru_cache(maxsize=16)
def _job(path: Path, size: int, variables: tuple[tuple[str, str], ...]) -> tuple[Mapping[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "outcomes")
        command = [*RINGRUN, "-np", str(size), sys.executable, __file__]
        env = {
            **os.environ,
            **dict(variables),
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        with Path(folder, "output").open("w+") as file:
            job = subprocess.Popen([*command, str(path), str(report)], env=env, stdout=file, stderr=file)
            try:
                late = _wait_while_cases_end(job, report)
            finally:
                job.kill()
                job.wait()
            file.seek(0)
            output = file.read() + late
        lines = report.read_text().splitlines() if report.exists() else []
        return dict(json.loads(line) for line in lines), output[-6000:]


def _wait_while_cases_end(job: subprocess.Popen[bytes], report: Path) -> str:
    """Return when ``job`` has ended, or with a message when no case has ended for `CASE_LIMIT` seconds."""
    before = -1
    while True:
        try:
            job.wait(CASE_LIMIT)
            return ""
        except subprocess.TimeoutExpired:
            ended = report.stat().st_size if report.exists() else 0
            if ended == before:
                return f"no case has ended for {CASE_LIMIT:.0f} s"
            before = ended


def run_cases(path: Path, report: Path) -> None:
    """As a rank: run the cases of ``path``, each in a generation of its own; rank 0 reports the failures of each."""
    from ring_notebook.api.basics import init, rank, shutdown
    from ring_notebook.api.objects import allgather_object

    spec = importlib.util.spec_from_file_location("cases_of_this_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for case in cases(path):
        init()
        failure = ""
        try:
            getattr(module, case)()
        except BaseException:
            failure = f"rank {rank()}:\n{traceback.format_exc()}"
        shutdown()
        init()
        failures = "\n".join(filter(None, allgather_object(failure)))
        if rank() == 0:
            with report.open("a") as file:
                file.write(json.dumps([case, failures]) + "\n")
        shutdown()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), Path(sys.argv[2]))
