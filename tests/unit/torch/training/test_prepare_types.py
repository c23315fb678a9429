"""What a type checker knows of the result of `prepare`: the classes that went in, and no loader where none did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.programs import ran

ROOT = Path(__file__).parents[4]

USE = """
import torch
from torch.utils.data import DataLoader
import ring_notebook.torch as ring

class Net(torch.nn.Linear):
    pass

def train(net: Net, optimizer: torch.optim.SGD, loader: DataLoader[int]) -> None:
    model, distributed, share = ring.prepare(net, optimizer, loader, scale_lr=True, num_groups=2)
    reveal_type(model)
    reveal_type(share)
    distributed.synchronize()
    reveal_type(ring.prepare(net, optimizer)[0])
    reveal_type(ring.prepare(net, optimizer, loader, strategy="ddp")[1])
"""


_LAST = ["train.Net", "torch.optim.sgd.SGD"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # without a cache mypy reads all of torch
def test_mypy_knows_the_result(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USE)
    done = ran([sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)], cwd=ROOT)
    revealed = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    assert revealed == ["train.Net", "torch.utils.data.dataloader.DataLoader[int]", *_LAST], done.stdout
    assert done.returncode == 0, done.stdout
