"""Ranks of a real job die, at every moment and in every way; the others train on to the right result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.programs import ringrun
from ring_notebook.launch.run_function import run

HERE = Path(__file__).parent
INIT = "from ring_notebook.api.basics import init; init()"


def train(n: int, victims: str, when: str, how: str, *options: str) -> subprocess.CompletedProcess[str]:
    options = options or ("--elastic",)
    return ringrun(*options, "-np", str(n), "python", str(HERE / "training.py"), victims, when, how)


def reports_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(reports, key=lambda report: int(report["job_rank"]))


def check(
    done: subprocess.CompletedProcess[str],
    n: int,
    dead: set[int],
    resumed: int = 6,
    per_host: int = 99,
    width: int = 2,
    error: float = 1e-6,
) -> None:
    """The survivors began with ``n`` ranks, went on from step ``resumed`` without the dead, and agree to the end.

    ``error``: of a weight of the model, which gives ``width`` numbers.
    """
    reports = reports_of(done)
    living = [rank for rank in range(n) if rank not in dead]
    assert [report["job_rank"] for report in reports] == living
    assert [report["rank"] for report in reports] == list(range(len(living))), "numbered again, in order"
    for report in reports:
        assert report["returned"] == "trained"
        host = int(report["job_rank"]) // per_host
        assert report["local_size"] == sum(rank // per_host == host for rank in living)
        assert report["starts"][0] == [n, 0]
        assert report["starts"][-1] == [len(living), resumed]
        assert all(start[1] == resumed for start in report["starts"][1:]), report["starts"]
        assert sorted(report["seen"]) == list(range(48)), "each sample of the epoch once, in spite of all"
        assert report["even"] == [living.index(rank) for rank in living if rank % 2 == 0]
        assert report["sums"] in ([0.0], []), "the process set reduced over its living members"
        assert report["seen"] == reports[0]["seen"]
        weight = torch.tensor(report["weight"])
        expected = reference(n, len(living), resumed, report["seen"], width)
        torch.testing.assert_close(weight, expected[: len(weight)], rtol=1e-5, atol=error)
    for rank in dead:
        assert re.search(rf"ringrun: rank {rank}( on \S+)? failed: ", done.stderr), done.stderr


def reference(n: int, then: int, resumed: int, seen: list[int], width: int = 2) -> torch.Tensor:
    """The weight that one process gets: batches of ``n`` up to step ``resumed``, then of ``then``."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * n, momentum=0.9)
    data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    batches = [seen[at * n : (at + 1) * n] for at in range(resumed)]
    rest = seen[resumed * n :]
    batches += [rest[at : at + then] for at in range(0, len(rest), then)]
    for number, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.01 * (n if number < resumed else then)
        optimizer.zero_grad()
        ((model(data[batch]) - 1.0).square().sum() / len(batch)).backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize(
    ("n", "victims", "how"),
    [
        pytest.param(4, "3", "SIGKILL", marks=pytest.mark.slow),
        (4, "0,1", "SIGKILL"),
        pytest.param(3, "0", "SIGSEGV", marks=pytest.mark.slow),
        (2, "1", "raise"),
        pytest.param(3, "0,1", "exit", marks=pytest.mark.slow),
        (2, "1", "leave"),
        pytest.param(2, "0", "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_the_living_train_on(n: int, victims: str, how: str) -> None:
    done = train(n, victims, "step", how)
    check(done, n, {int(rank) for rank in victims.split(",")})
    ends = {
        "SIGKILL": "killed by SIGKILL",
        "SIGSEGV": "killed by SIGSEGV",
        "exit": "exit code 3",
        "leave": "exit code 0",
        "raise": "exit code 1",
    }
    assert f"failed: {ends[how]}" in done.stderr
    assert ("ValueError: a bug of this rank" in done.stderr) == (how == "raise")
    assert "\x1e" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "victim"),
    [("open", "0"), ("restore", "0"), ("open", "2"), ("reset", "0"), ("sync", "0"), ("sync", "2"), ("roll call", "2")],
)
def test_a_death_while_the_living_open_a_generation(when: str, victim: str) -> None:
    """Rank 1 dies in a step and another one on the way to the next generation, leading it or not."""
    check(train(4, victim, when, "SIGKILL"), 4, {1, int(victim)})


def test_a_death_in_a_commit() -> None:
    """The others have the commit that rank 2 did not get, or the one before; all go on from rank 0's."""
    done = train(3, "2", "commit", "SIGKILL")
    resumed = reports_of(done)[0]["starts"][-1][1]
    assert resumed in (3, 6)
    check(done, 3, {2}, resumed)


def test_too_few_are_left() -> None:
    done = train(3, "1", "step", "SIGKILL", "--min-np", "3")
    assert done.returncode == 137
    assert done.stdout == ""
    assert "2 ranks of 3 left, fewer than the 3 of --min-np" in done.stderr
    assert "RingError: 2 of 3 ranks are left, fewer than the 3 of RING_MIN_NP" in done.stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_job() -> None:
    code = f"import os, sys\nif os.environ['RING_RANK'] == '1': sys.exit(4)\n{INIT}"
    done = ringrun("--elastic", "-np", "3", "python", "-c", code)
    assert done.returncode == 4
    assert "ringrun: rank 1 exited (exit code 4) before all ranks had called init(); ending the job" in done.stderr
    assert "RingError: rank 0 failed to initialize: rank 1 exited (exit code 4) before" in done.stderr


def test_ranks_that_act_as_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_ALGORITHM", "ring")
    check(train(3, "1", "step", "SIGKILL"), 3, {1})


def test_a_program_without_ranks() -> None:
    done = ringrun("--elastic", "-np", "2", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n" * 2), done.stderr


@pytest.mark.slow
def test_the_supervisor_sleeps_when_a_rank_has_ended() -> None:
    look = "cut -d ' ' -f 14,15 /proc/$PPID/stat"  # its user and system time, in ticks
    done = ringrun(
        "--elastic", "-np", "2", "sh", "-c", f"[ $RING_RANK = 0 ] || {{ sleep .5; {look}; sleep 2; {look}; }}"
    )
    before, after = (sum(map(int, line.split())) for line in done.stdout.splitlines())
    # One that sleeps takes a thousandth of a second; one that does not, all two, or its part of a busy machine.
    assert (after - before) / os.sysconf("SC_CLK_TCK") < 0.1


def test_run_gives_the_results_of_the_living() -> None:
    def job() -> tuple[int, int, float]:
        import os

        import torch

        import ring_notebook.torch as hvd

        hvd.init()
        before = hvd.rank()
        state = hvd.elastic.TorchState(total=0.0)

        @hvd.elastic.run
        def add(state: Any) -> float:
            while state.total < 10:
                if state.total > 5 and before == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.total += hvd.allreduce(torch.ones(1)).item()
                state.commit()
            return float(state.total)

        total = add(state)
        return before, hvd.size(), total

    assert run(job, n=3, min_np=2) == [(0, 2, 10.0), (2, 2, 10.0)]
    with pytest.raises(ValueError, match="min_np must be between 1 and the 2 ranks of the job, got 3"):
        run(job, n=2, min_np=3)


@pytest.mark.slow
def test_horovods_own_elastic_script(tmp_path: Path) -> None:
    """Its example, with nothing but the import changed, loses the rank that leads in its second epoch."""
    theirs, ours = "import horovod.torch as hvd\n", "import ring_notebook.torch as hvd\n"
    source = (HERE.parent / "ranks" / "scripts" / "elastic_mnist.py").read_text()
    assert source.count(theirs) == 1
    dies = """
import os, signal
import ring_notebook.torch as hvd
commit = hvd.elastic.TorchState.commit
def commit_or_die(state):
    if state.epoch == 2 and state.batch == 5 and starts == 1 and os.environ["RING_RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    commit(state)
hvd.elastic.TorchState.commit = commit_or_die
"""
    tells = """
    lr = optimizer.param_groups[0]["lr"]
    os.write(1, f"{hvd.rank()} of {hvd.size()}: {starts} {state.epoch} {accuracy} {lr}\\n".encode())
"""
    script = tmp_path / "elastic_mnist.py"
    head, rest = source.replace(theirs, ours).split("parser = ", 1)
    script.write_text(f"{head}{dies}parser = {rest}{tells}")
    done = ringrun("--elastic", "-np", "3", "python", str(script), "--fail-in-epoch", "0")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["0 of 2", "1 of 2"]
    for line in lines:
        starts, epoch, accuracy, lr = line.split(": ")[1].split()
        assert (starts, epoch, lr) == ("2", "4", "0.2")
        assert float(accuracy) > 0.85
