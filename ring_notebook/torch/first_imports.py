"""Its import loads what PyTorch loads at the first optimizer that is made: for the process that forks engines."""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.0)
