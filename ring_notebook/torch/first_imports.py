"""Imports modules that PyTorch loads with the first optimizer, for the process that forks engines."""

from __future__ import annotations

import torch

torch.optim.SGD([torch.zeros(1)], lr=0.0)
