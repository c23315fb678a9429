"""The variables of torchrun, for each launcher, and which ranks are ours."""

from __future__ import annotations

import socket

from ring_notebook.rank.rank_variables import (
    MASTER,
    free_port,
    is_of_this_job,
    loopback,
    rank_variables,
    variables_of_rank,
)


def test_the_names_of_torchrun() -> None:
    assert rank_variables(1, 4, 1, 2, "head:1234") == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
        MASTER: "head:1234",
    }


def test_gloo_stays_on_a_single_host() -> None:
    assert rank_variables(0, 2, 0, 2, loopback())["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_of_other_launchers() -> None:
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", MASTER: "a:1"}
    assert variables_of_rank(hydra) == rank_variables(3, 4, 1, 2, "a:1")
    pals = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", MASTER: "a:1"}
    assert variables_of_rank(pals) == rank_variables(3, 4, 1, 2, "a:1")
    assert variables_of_rank({"PMI_RANK": "3"}) == {}
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", MASTER: "a:1"}
    assert variables_of_rank(slurm) == {}, "a batch script, whose step has no tasks yet"
    of_step = {**slurm, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}  # of sbatch --ntasks=4 without --ntasks-per-node
    assert variables_of_rank(of_step) == rank_variables(3, 4, 1, 2, "a:1")


def test_whose_ranks_they_are() -> None:
    env = rank_variables(0, 2, 0, 2, loopback())
    assert is_of_this_job(0, 2, env)
    assert not is_of_this_job(1, 2, env)
    assert not is_of_this_job(0, 3, env)
    assert not is_of_this_job(0, 2, env | {"MASTER_PORT": "1"})
    assert not is_of_this_job(0, 2, env | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not is_of_this_job(0, 1, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})


def test_a_free_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
