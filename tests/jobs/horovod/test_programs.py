"""Programs that import Horovod, started as their users start them: by ``ringrun --horovod`` and ``horovod.run``."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.forked_ranks import ForkServer
from harness.programs import executable, ran
from ring_notebook.launch import horovod_run

MNIST = Path(__file__).parents[2] / "ranks" / "scripts" / "mnist.py"
RUN_0_28 = (
    "func, args, kwargs, num_proc, min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, hosts, hostfile, "
    "start_timeout, ssh_port, ssh_identity_file, disable_cache, output_filename, verbose, use_gloo, use_mpi, mpi_args, "
    "network_interface, executable, np, min_np, max_np"
)
# Without torch, which takes ranks seconds to import; the example and ignite have it.
PROGRAM = """
import os
from horovod.common.process_sets import global_process_set
from horovod.runner.common.util.env import get_env_rank_and_size
from ring_notebook.api.basics import init, local_rank, local_size, rank

told = [*get_env_rank_and_size(), int(os.environ["HOROVOD_LOCAL_RANK"]), int(os.environ["HOROVOD_LOCAL_SIZE"])]
init()
assert told == [rank(), global_process_set.size(), local_rank(), local_size()], told
print(global_process_set.size(), flush=True)
"""


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, *arguments], cwd=cwd)


def test_ringrun_gives_its_ranks_horovod_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ringrun = ("-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2")
    done = python(*ringrun, "--horovod", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2\n" * 2), done.stderr
    done = python(*ringrun, "python", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'horovod'" in done.stderr


@pytest.mark.slow
def test_the_example_starts_itself_by_horovod_run(fork_server: ForkServer) -> None:
    code = (
        f"import ring_notebook, runpy; ring_notebook.as_horovod(); runpy.run_path({str(MNIST)!r}, run_name='__main__')"
    )
    with fork_server.used():
        done = python("-c", code, "--num-proc", "2", "--epochs", "1", "--communication", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Test set: Average loss") == 1


def test_the_keywords_are_those_of_0_28() -> None:
    assert ", ".join(inspect.signature(horovod_run.run).parameters) == RUN_0_28


def rank_of_horovod(factor: int, plus: int = 0) -> int:
    from horovod.common.process_sets import global_process_set

    from ring_notebook.api.basics import init

    init()
    rank: int = global_process_set.rank()
    print("rank", rank, "of", os.environ["OTHER"])  # noqa: T201
    return rank * factor + plus


def test_run_takes_what_has_no_meaning_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = executable(tmp_path / "python", f'#!/bin/sh\nexport OTHER=1\nexec {sys.executable} "$@"\n')
    results = horovod_run.run(
        rank_of_horovod,
        (10,),
        {"plus": 1},
        np=2,
        max_np=8,
        slots=4,
        cooldown_range=(1, 2),
        hosts="localhost:2",
        start_timeout=30,
        ssh_port=22,
        ssh_identity_file="id",
        disable_cache=True,
        output_filename=str(tmp_path / "out"),
        verbose=2,
        use_mpi=True,
        mpi_args="",
        network_interface="lo",
        executable=str(other),
    )
    assert results == [1, 11]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 of 1", "rank 1 of 1"]  # both, as Horovod has it
    assert [(tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() for rank in (0, 1)] == [
        "rank 0 of 1\n",
        "rank 1 of 1\n",
    ]


def fails_on_rank_0(survivor: str) -> str:
    import pathlib
    import time

    from ring_notebook.api.basics import barrier, init, rank

    init()
    barrier()
    if rank() == 0:
        while not pathlib.Path(survivor).exists():  # the other rank has left the barrier too
            time.sleep(0.01)
        raise LookupError("on purpose")
    pathlib.Path(survivor).touch()
    return "survived"


@pytest.mark.parametrize("limit", [None, 0])
def test_min_num_proc_is_elastic_unless_no_reset_is_allowed(limit: int | None, tmp_path: Path) -> None:
    given = (str(tmp_path / "survivor"),)
    if limit is None:
        assert horovod_run.run(fails_on_rank_0, given, num_proc=2, min_num_proc=1) == ["survived"]
    else:
        with pytest.raises(LookupError, match="on purpose"):
            horovod_run.run(fails_on_rank_0, given, num_proc=2, min_num_proc=1, reset_limit=limit)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, "hosts or hostfile, not both"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi, not both"),
        ({"num_proc": 0}, "num_proc must be at least 1, got 0"),
        ({"hosts": "a:1,b:1", "ssh_port": 22}, "cannot set ssh_port for other hosts; set Port"),
        ({"hosts": "a:1,b:1", "ssh_identity_file": "id"}, "cannot set ssh_identity_file"),
        ({"hosts": "a:1,b:1", "network_interface": "eth0"}, "cannot set network_interface .*UCX_NET_DEVICES"),
        ({"num_proc": 2, "min_num_proc": 3}, "min_np must be between 1 and the 2 ranks"),
    ],
)
def test_what_run_cannot_do_it_says(keywords: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        horovod_run.run(rank_of_horovod, **keywords)  # type: ignore[arg-type]


IGNITE = """
import ring_notebook
ring_notebook.as_horovod()
import ignite.distributed as idist
import torch

def work(local_rank, text):
    total = idist.all_reduce(torch.tensor([local_rank + 1.0]))
    print(text, idist.get_world_size(), total.item(), flush=True)

if __name__ == "__main__":
    with idist.Parallel(backend="horovod", nproc_per_node=2) as parallel:
        parallel.run(work, "of ignite")
"""


@pytest.mark.slow
def test_ignite_spawns_ranks_itself(tmp_path: Path) -> None:
    pytest.importorskip("ignite", reason="pip install pytorch-ignite: its own spawn is not tested without it")
    (tmp_path / "train.py").write_text(IGNITE)
    done = python("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "of ignite 2 3.0\n" * 2), done.stderr
