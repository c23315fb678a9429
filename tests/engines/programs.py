"""What ranks do in the tests of engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def train(steps: int = 10) -> tuple[int, int, int, float]:
    """Rank, size, threads, and the weights: each rank has other samples and begins with other weights."""
    import torch

    import ring_notebook.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(8, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(steps):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return hvd.rank(), hvd.size(), torch.get_num_threads(), weights.double().pow(2).sum().item()


def train_with_a_token(folder: str) -> tuple[int, int, int, float, str, str]:
    """The same, and what must cross the network in no clear text: of the environment, and the key of the ranks.

    Each rank says in ``folder`` that it has trained, and trains again when somebody has written ``go on`` there.
    """
    from ring_notebook.core import world

    rank, *_ = train()
    Path(folder, f"trained {rank}").touch()
    while not Path(folder, "go on").exists():
        time.sleep(0.05)
    found = train()
    rendezvous = world.prepare_host().rendezvous
    assert rendezvous is not None
    return *found, os.environ["HF_TOKEN"][::-1], rendezvous.key.decode()


def fail() -> None:
    """Rank 1 raises, while rank 0 waits for it."""
    import ring_notebook.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("of rank 1")
    hvd.barrier()


def die() -> None:
    """Rank 1 is killed, while rank 0 waits for it."""
    import ring_notebook.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def grow(flag: str, wanted: int) -> tuple[int, int]:
    """Wait until there are so many ranks, train a little, and say rank and size."""
    from ring_notebook.api import basics, elastic_training, object_state

    basics.init()

    def wait_for_others(state: object_state.ObjectState) -> tuple[int, int]:
        Path(flag).touch()
        while basics.size() < wanted:
            state.check_host_updates()
            time.sleep(0.02)
        basics.barrier()
        return basics.rank(), basics.size()

    return elastic_training.run(wait_for_others)(object_state.ObjectState(step=0))


def grow_and_log(flag: str, wanted: int) -> tuple[int, int]:
    """The same; then rank 0, and every rank, tell the callbacks of an executor on Ray."""
    from ring_notebook.ray import ray_logger

    found = grow(flag, wanted)
    ray_logger.log({"rank": found[0]})
    ray_logger.log({"any rank": found[0]}, chief_only=False)
    return found
