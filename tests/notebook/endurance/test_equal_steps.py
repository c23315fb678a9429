"""Whatever ends a training cell, all ranks have made the same optimizer steps when the next one begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from notebook.endurance.equal_steps import COMPRESSED, ENDS, MODEL, TRAININGS, Training
from ring_notebook.errors import CollectiveMismatch, DriftError
from ring_notebook.notebook.cluster.cluster import Cluster

LIVING = [end for end in ENDS if end != "is killed"]


@pytest.fixture(scope="module")
def cluster(_own_records: Path) -> Iterator[Cluster]:
    """Three engines: one may fail while the second is ahead of the third."""
    with Cluster(3) as started:
        yield started


@pytest.fixture(autouse=True)
def _fresh(cluster: Cluster) -> None:
    if [engine.state for engine in cluster.status()] != ["idle"] * cluster.n:  # a test has failed
        cluster.restart()
    cluster.run("import torch.distributed as dist\nif dist.is_initialized(): dist.destroy_process_group()").wait()
    cluster.run("%reset -f").wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRAININGS if name not in COMPRESSED])
def test_all_ranks_have_made_the_same_steps(cluster: Cluster, name: str) -> None:
    training = Training(cluster, name)
    for number in range(6):
        training.run(LIVING[number % len(LIVING)])
        training.check()
    training.run(steps=300)  # as many as a busy machine makes until a run is interrupted
    training.check()
    training.check_against_one_process()


def test_ranks_that_have_parted_are_named_and_made_equal(cluster: Cluster) -> None:
    training = Training(cluster, "sgd")
    training.run(steps=3)
    changes = "if rank == 1:\n    with torch.no_grad(): model.bias += 1"
    training.run("is interrupted")
    cluster.run(changes).wait()
    said = training.run(steps=3)
    assert "rank 1 differs from rank 0 since a run that failed or was stopped: parameter bias" in said
    training.check()
    assert "parted" not in training.run(steps=1)
    cluster.run(changes).wait()  # after a run that has ended well nothing is repaired
    with pytest.raises(AssertionError, match="the ranks have different weights: bias differ"):
        training.run(steps=1)


@pytest.mark.parametrize(
    ("made", "strategy"),
    [("SGD(p, lr=0.1)", None), ("LBFGS(p, lr=0.1, max_iter=2)", None), ("SGD(p, lr=0.1)", "ddp")],
    ids=["SGD", "LBFGS", "SGD with ddp"],
)
def test_one_element_of_a_large_tensor_is_found_within_16_steps(
    cluster: Cluster, made: str, strategy: str | None
) -> None:
    begin = (
        f"""
layer = torch.nn.Linear(512, 512)
p = layer.parameters()
optimizer = torch.optim.{made}
model, optimizer = ring.prepare(layer, optimizer, strategy={strategy!r})
"""
        """
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 512)).square().mean()
    loss.backward()
    return loss
def step():
    if isinstance(optimizer, torch.optim.LBFGS): return optimizer.step(closure)
    closure()
    optimizer.step()
step()
if rank == 0: raise ValueError("boom")
"""
    )
    with pytest.raises(ValueError, match="boom"):
        cluster.run(MODEL + begin).wait()
    if strategy:  # the comparison is on another communicator than the user's collectives
        leaves = "if rank == 0: torch.distributed.all_reduce(torch.ones(5, dtype=torch.int64))\nelse: optimizer.step()"
        with pytest.raises(CollectiveMismatch, match="comparison of ranks"):
            cluster.run(f"closure()\n{leaves}", timeout=60).wait()
    cluster.run("if rank == 2:\n    with torch.no_grad(): layer.weight.view(-1)[9 * 1024] += 1").wait()
    runs = [cluster.run(f"for _ in range({steps}): step()").wait() for steps in (3, 6, 1, 6)]
    said = ["differs from rank" in "".join(piece.text for piece in run.log.view().output) for run in runs]
    assert said == [False, False, True, False]
    cluster.run("found = layer.state_dict()").wait()
    first, *others = [cluster.pull("found", rank) for rank in range(3)]
    assert all(torch.equal(one[key], first[key]) for one in others for key in first)


def test_buffers_and_averages_known_by_a_broadcast_alone(cluster: Cluster) -> None:
    """Out of a state_dict, whose tensors are no buffers. A model that each rank trains for itself is left alone."""
    begin = """
model, alone = make(), make()
model.register_buffer("mean", torch.zeros(4))
average = {"weight": model.weight.detach().clone()}
kept = alone.state_dict()
for each in model.state_dict(), average, kept: ring.broadcast_parameters(each, root_rank=0)
optimizer = ring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
def step():
    optimizer.zero_grad()
    loss_of(0, rank).backward()
    optimizer.step()
step()
if rank == 0: raise ValueError("boom")
"""
    with pytest.raises(ValueError, match="boom"):
        cluster.run(MODEL + begin).wait()
    cluster.run("""
model.mean = torch.full((4,), rank == 1, dtype=torch.float32)  # another tensor
average["weight"] += rank == 1
with torch.no_grad(): alone.weight += rank
""").wait()
    said = "".join(piece.text for piece in cluster.run("step()").wait().log.view().output)
    assert "rank 1 differs from rank 0" in said
    assert "tensor mean (4,), tensor weight (4, 8)." in said
    cluster.run("apart = (alone.weight - make().weight).mean().item()").wait()
    cluster.run("found = model.mean.any().item(), torch.equal(average['weight'], make().weight), round(apart)").wait()
    assert [cluster.pull("found", rank) for rank in range(3)] == [(False, True, rank) for rank in range(3)]


@pytest.mark.slow
def test_an_error_instead_of_a_repair_or_when_the_user_wants_none(cluster: Cluster) -> None:
    training = Training(cluster, "sgd")
    setting = """
import builtins, os
from ring_notebook.config import config
asks = builtins.input
def set_repair(repair, answer=None):
    os.environ["RING_REPAIR"] = repair
    config.cache_clear()
    builtins.input = asks if answer is None else lambda question: asked.append(question) or answer
"""
    cluster.run(setting).wait()
    step = TRAININGS["sgd"][1].replace("HERE", "pass") + "\nstep()"
    for choice in ("'error'", "'ask', 'n'"):
        training.run("raises")
        cluster.run(f"asked = []\nset_repair({choice})\nif rank == 2: optimizer.param_groups[0]['lr'] *= 2").wait()
        with pytest.raises(DriftError, match=r"rank 2 differs from rank 0 .*: option lr of group 0"):
            cluster.run(step).wait()
        assert [len(cluster.pull("asked", rank)) for rank in range(3)] == [int("ask" in choice), 0, 0]
        cluster.run("set_repair('ask', 'y')").wait()
        cluster.run(step).wait()
        training.check()
    cluster.run("set_repair('broadcast')").wait()


SEARCH = """
class Search(torch.optim.Optimizer):
    def step(self, closure):
        with torch.enable_grad(): loss = closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]: p -= 0.1 * p.grad
        if rank == fails: raise ValueError("boom")
        return loss
def step():
    def closure():
        optimizer.zero_grad()
        loss = loss_of(0, rank)
        loss.backward()
        return loss
    optimizer.step(closure)
model = make()
optimizer = Search(model.parameters(), {})
seen = []
optimizer.register_step_post_hook(lambda *_: seen.append(next(iter(model.parameters())).detach().clone()))
model, optimizer = ring.prepare(model, optimizer, OPTIONS)
"""


@pytest.mark.parametrize("options", ["", "strategy='ddp'", "op=ring.Adasum"])
def test_hooks_behind_a_step_that_is_taken_back_do_not_run(cluster: Cluster, options: str) -> None:
    """One rank raises in a step with a closure, when the others have come to its end."""
    n = 2 if "Adasum" in options else 3
    cell = MODEL + SEARCH.replace("OPTIONS", options)
    with pytest.raises(ValueError, match="boom"):
        cluster.run(f"{cell}\nfails = 1\nstep()", n=n).wait()
    cluster.run("found = seen, torch.equal(make().weight, next(iter(model.parameters())))", n=n).wait()
    assert [cluster.pull("found", rank) for rank in range(n)] == [([], True)] * n
    cluster.run(f"{cell}\nfails = None\nstep()\nfound = *seen, next(iter(model.parameters())).detach()", n=n).wait()
    weights = [tensor for rank in range(n) for tensor in cluster.pull("found", rank)]
    assert len(weights) == 2 * n
    assert all(torch.equal(tensor, weights[0]) for tensor in weights)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_own_records")
@pytest.mark.parametrize(("name", "n"), [("adam", 2), ("ddp", 4)])
def test_twenty_ends_in_one_training(name: str, n: int) -> None:
    """Interrupts, failures, mismatches and kills with heal, drawn by a seed."""
    with Cluster(n) as own:
        training = Training(own, name, seed=n)
        made = 0
        for _ in range(20):
            training.run(training.random.choice(list(ENDS)))
            before, made = made, training.check()
            assert made >= before
        training.run(steps=5)
        training.check()
        training.check_against_one_process()
