"""A notebook whose engines run in a job of PBS or LSF, for which programs stand in, on this host in place of others."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook.kernel import ANSI, Notebook

HERE = socket.gethostname()
JOB = {"comment": "Not Running: Insufficient amount of resource: ncpus"}
STATES = {
    "pbs": {
        "waits": json.dumps({"Jobs": {"17.s": {"job_state": "Q", **JOB}}}),
        "held": json.dumps({"Jobs": {"17.s": {"job_state": "H"}}}),
        "runs": json.dumps({"Jobs": {"17.s": {"job_state": "R", "exec_host": f"{HERE}/0*2"}}}),
        "ended": json.dumps({"Jobs": {"17.s": {"job_state": "F"}}}),
    },
    "lsf": {
        "waits": "PEND|Not enough hosts to meet the job's spanning requirement;|-",
        "held": "PSUSP|-|-",
        "runs": f"RUN|-|2*{HERE}",
        "ended": "EXIT|-|-",
    },
}
PROGRAMS = {
    "pbs": {"qsub": "echo 17.s", "qstat": 'cat "$STATE"', "qdel": 'echo $1 > "$STATE.cancelled"'},
    "lsf": {"bsub": "echo 'Job <17.s> is submitted'", "bjobs": 'cat "$STATE"', "bkill": 'echo $1 > "$STATE.cancelled"'},
}


class StandIn:
    """A batch system with one job."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.number = "17.s" if name == "pbs" else "17"
        self._file = folder / "state"
        self._programs = folder / "bin"
        self._programs.mkdir()
        for program, text in PROGRAMS[name].items():
            (self._programs / program).write_text(f"#!/bin/sh\nSTATE={self._file}\n{text.replace('<17.s>', '<17>')}\n")
            (self._programs / program).chmod(0o755)
        self.set("waits")

    def set(self, state: str) -> None:
        """Let the job wait, be held, run or have ended."""
        self._file.with_suffix(".new").write_text(STATES[self.name][state])
        self._file.with_suffix(".new").replace(self._file)

    @property
    def cancelled(self) -> str:
        """The number of the job that was cancelled."""
        return (self._file.parent / "state.cancelled").read_text().strip()

    def use(self, notebook: Notebook) -> None:
        notebook.run(f"import os\nos.environ['PATH'] = {str(self._programs)!r} + ':' + os.environ['PATH']")


@pytest.fixture(name="notebook")
def _notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    notebook.run("%load_ext ring_notebook")
    yield notebook
    notebook.close()


def status(notebook: Notebook, until: str) -> str:
    """What `%ring status` says, or how it fails, once ``until`` is in it."""
    deadline = time.monotonic() + 120
    while True:
        (output,) = notebook.run("%ring status")
        said = "\n".join(output["traceback"]) if "traceback" in output else str(output["data"]["text/plain"])
        if re.search(until, ANSI.sub("", said)):
            return ANSI.sub("", said)
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["pbs", pytest.param("lsf", marks=pytest.mark.slow)])
def test_cells_wait_for_a_job_and_run_in_it(name: str, notebook: Notebook, tmp_path: Path) -> None:
    system = StandIn(name, tmp_path)
    system.use(notebook)
    notebook.text(f"%ring start --batch {name} -n 2 --time 1h")
    notebook.text("%%ringtrain --out queued\nprint(ring.rank(), 'of', ring.size())")
    notebook.text("cell = queued")
    assert f"job {system.number} waits: no hosts are free" in status(notebook, "no hosts")
    assert f"job {system.number}" in notebook.text("%ring queue")
    system.set("held")
    status(notebook, "it is held; `(qrls|bresume) 17")
    system.set("runs")
    assert notebook.text("print(cell.wait().status)").strip() == "ok"
    stopped = notebook.text("%ring stop")
    assert re.search(r"Stopped 2 engines. Cancelled \w+ job 17\S* It had 2 CPUs for .* CPU hours", stopped), stopped
    assert system.cancelled == system.number


@pytest.mark.slow
def test_a_job_that_ends_before_it_runs_ends_its_cells(notebook: Notebook, tmp_path: Path) -> None:
    system = StandIn("pbs", tmp_path)
    system.use(notebook)
    notebook.text("%ring start --batch pbs -n 2")
    notebook.text("%%ringtrain --out queued\n1")
    system.set("ended")
    assert "PBS job 17.s has ended" in notebook.error("queued.wait()")[1]
    status(notebook, "ClusterError: PBS job 17.s has ended")


@pytest.mark.slow
def test_what_cannot_be_submitted_is_refused(notebook: Notebook) -> None:
    for line, said in (
        ("--batch none", "no site 'none'; known are aurora, lsf, pbs"),
        ("--batch pbs", "qsub, which submits jobs to PBS, is not on the PATH"),
        ("--batch pbs --hosts a:1", "--hosts and --batch exclude each other"),
        ("-N 2 --time 1h", "-N, --time: only of a batch job; add --batch"),
    ):
        assert said in notebook.error(f"%ring start {line}")[1]


@pytest.mark.slow
def test_variables_are_kept_before_the_engines_end(notebook: Notebook, tmp_path: Path) -> None:
    system = StandIn("pbs", tmp_path)
    system.use(notebook)
    notebook.text("%ring start --batch pbs -n 2 --time 1h --signal 60m --idle 2s")
    notebook.text("%%ringtrain --out queued\nvalue = 5 + ring.rank()")
    system.set("runs")
    released = status(notebook, "Released the hosts")
    assert re.search(r"no cell has run for 2.0 s\. Kept 1 variable of 2 ranks as idle: ", released), released
    listed = notebook.text("%ring snapshots")
    assert re.search(r"^idle .*\nwalltime ", listed, re.MULTILINE), listed
    notebook.text("%ring snapshots restore idle")
    notebook.text("%%ringtrain\nassert value == 5 + ring.rank()\nring.log(x=1)")
