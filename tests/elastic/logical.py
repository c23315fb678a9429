"""Trains logical ranks in an elastic job and writes bits of what it computes to a file; some ranks die meanwhile.

``python logical.py PATH LOGICAL WANTED [STEP:RANKS ...]``: before that step the ranks of RANKS ("2,3") kill themselves,
once. Behind step 5 the job waits until there are WANTED ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ring_notebook.torch as ring

path, logical, wanted, *deaths = sys.argv[1:]
EPOCHS, BATCH, WAITS = 3, 2, 5
joined = "RING_STARTED_AGAIN" in os.environ
ring.init()
job_rank = int(os.environ["RING_RANK"])
torch.manual_seed(os.getpid() if joined or job_rank else 7)
random.seed(7)
layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 4)]
model: Any = nn.Sequential(*layers)
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
numbers = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 1, 8, 8, generator=numbers), torch.randint(4, (64,), generator=numbers))
loader: Any = DataLoader(data, BATCH, shuffle=True)
model, optimizer, schedule, loader = ring.prepare(model, optimizer, schedule, loader, logical=int(logical))
sizes: list[int] = []
last: dict[int, str] = {}


def bits(tensors: Any) -> str:
    return hashlib.sha256(b"".join(one.detach().double().numpy().tobytes() for one in tensors)).hexdigest()


def perhaps_die(step: int) -> None:
    for death in deaths:
        at, victims = death.split(":")
        if int(at) == step and job_rank in map(int, victims.split(",")) and not joined:
            os.kill(os.getpid(), signal.SIGKILL)


@ring.elastic.run
def train(state: Any) -> None:
    sizes.append(ring.size())
    last_turn = (ring.rank() + 1) * ring.logical_size() // ring.size() - 1
    while state.epoch < EPOCHS:
        for x, y in loader:
            perhaps_die(state.step)
            optimizer.zero_grad()
            noise = random.random() * torch.rand(())
            loss = cross_entropy(model(x + noise), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            last[ring.logical_rank()] = loss.item().hex()
            state.step += ring.logical_rank() == last_turn
            if state.step % 2 == 0:
                state.commit()  # at the end of a round
            while state.step == WAITS and ring.logical_rank() == last_turn and ring.size() < int(wanted):
                state.check_host_updates()
                time.sleep(0.01)
        state.epoch += 1
        state.commit()


training = ring.elastic.TorchState(model, optimizer, schedule=schedule, step=0, epoch=0)
train(training)
first, end = ((ring.rank() + one) * ring.logical_size() // ring.size() for one in (0, 1))
last = {rank: loss for rank, loss in last.items() if first <= rank < end}
found = ring.allgather_object(last)
state_of_optimizer = [one for entry in optimizer.state.values() for one in entry.values()]
computed = {
    "steps": training.step,
    "losses": sorted(pair for one in found for pair in one.items()),
    "weights": bits(model.parameters()),
    "state": bits(one for one in state_of_optimizer if isinstance(one, torch.Tensor)),
    "buffers of logical rank 0": bits(model.buffers()),
    "rate": schedule.get_last_lr(),
    "drawn": [random.random(), torch.rand(()).item()],
}
if ring.rank() == 0:
    with open(path, "w") as file:
        json.dump({"computed": computed, "sizes": sizes}, file)
