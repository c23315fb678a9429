"""Trains logical ranks with checkpoints and writes bits of what it computes to a file; may leave behind some steps."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ring_notebook.torch as ring

EPOCHS, BATCH = 3, 2


def bits(tensors: Any) -> str:
    return hashlib.sha256(b"".join(one.detach().double().numpy().tobytes() for one in tensors)).hexdigest()


def main() -> None:
    path, folder, every, leaves_after = sys.argv[1:]
    ring.init()
    torch.manual_seed(7)
    random.seed(7)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 4)]
    model: Any = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    data = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(4, (64,)))
    loader: Any = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, schedule, loader = ring.prepare(model, optimizer, schedule, loader, logical=4)
    saved = ring.checkpoint(model, optimizer, schedule, loader, every=every, folder=folder, background=True)
    last: dict[int, Tensor] = {}
    for _ in saved.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            noise = random.random() * torch.rand(())
            loss = cross_entropy(model(x + noise), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            last[ring.logical_rank()] = loss.detach()
            saved.step()
            if saved.steps == int(leaves_after):
                saved.wait()
                return
    found = ring.allgather_object({rank: loss.item().hex() for rank, loss in last.items()})
    state = [one for group in optimizer.state_dict()["state"].values() for one in group.values()]
    computed = {
        "steps": saved.steps,
        "losses": {str(rank): loss for of_rank in found for rank, loss in of_rank.items()},
        "weights": bits(model.parameters()),
        "state": bits(one for one in state if isinstance(one, Tensor)),
        "buffers of logical rank 0": bits(model.buffers()),
        "drawn": [random.random(), torch.rand(()).item()],
    }
    if ring.rank() == 0:
        with open(path, "w") as file:
            json.dump(computed, file)


main()
