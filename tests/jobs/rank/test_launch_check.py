"""Starts of several processes that do not find each other, as the environments that launchers give them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import executable, ran
from harness.waiting import LIMIT
from ring_notebook.errors import RingError
from ring_notebook.rank.started_together import check_alone

SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
BATCH_SCRIPT = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
ONE_OF_OURS = {"PMI_SIZE": "1", "PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            SRUN,
            "process 1 of 4 that srun started .SLURM_STEP_NUM_TASKS=4. found no other ranks.*"
            "srun --mpi=pmi2.*--mpi=pmix.*-np 4",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "process 0 of 2 that torchrun started"),
        (
            {
                "TORCHELASTIC_RUN_ID": "a",
                "GROUP_WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "WORLD_SIZE": "4",
                "RANK": "3",
            },
            "rank 3: torchrun started 4 ranks on 2 hosts.*RING_RENDEZVOUS=HOST:PORT.*`ringrun -np 4 -H HOST:2,HOST:2",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "process 1 of 2 that mpiexec started .*the mpiexec that belongs to"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}, "process 2 of 3 that mpirun of Open MPI started"),
        ({"MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_RANK": "2"}, "process 2 of 3 that mpiexec of MVAPICH started"),
    ],
)
def test_several_that_are_alone_are_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(RingError, match=words):
        check_alone(env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH_SCRIPT,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, **ONE_OF_OURS},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "four", "RANK": "0"},
    ],
    ids=str,
)
def test_one_that_is_meant_is_not(env: dict[str, str]) -> None:
    check_alone(env)


@pytest.mark.parametrize(("env", "code"), [(SRUN, 1), (BATCH_SCRIPT, 0)])
def test_init_refuses(env: dict[str, str], code: int) -> None:
    program = "from ring_notebook.api.basics import init, size; init(); print(size())"
    done = ran([sys.executable, "-c", program], env={**os.environ, **env})
    assert (done.returncode, done.stdout) == (code, "" if code else "1\n"), done.stderr
    assert ("RingError: process 1 of 4 that srun started" in done.stderr) is bool(code)


TERMINAL = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4711"}
ASK = """
import sys
from ring_notebook.rank.started_together import check_alone, started_several
check_alone() if sys.argv[1:] else None
sys.exit(3 * (started_several() is not None))
"""


@pytest.mark.parametrize(
    ("shell", "terminal", "env", "codes"),
    [
        (True, True, TERMINAL, (0, 0)),  # in the shell of `srun --pty bash`
        (True, True, SRUN, (3, 1)),  # another terminal
        (True, False, TERMINAL, (3, 1)),  # a later srun in that shell, which starts several
        (False, True, TERMINAL, (3, 1)),  # `srun --pty python train.py` itself
    ],
)
def test_a_shell_in_the_terminal_of_srun_is_one(
    shell: bool, terminal: bool, env: dict[str, str], codes: tuple[int, int], tmp_path: Path
) -> None:
    """A step with a terminal has as many tasks as it has slots, and the shells of all others have ended at once."""
    step = [str(executable(tmp_path / "slurmstepd", '#!/bin/sh\n"$@"\nexit $?\n'))]
    between = ["sh", "-c", '"$@"; exit $?', "sh"] if shell else []
    for more, code in zip(([], ["alone"]), codes, strict=True):
        command = [*step, *between, sys.executable, "-c", ASK, *more]
        if terminal:
            command = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)", *command]
        done = subprocess.run(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            start_new_session=True,
            check=False,
        )
        assert done.returncode == code, done
