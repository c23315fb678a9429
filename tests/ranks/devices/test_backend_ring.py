"""Backend "ring" of torch.distributed refuses tensors of a device on every rank, with what to do, and lives on.

It moves tensors in CPU memory. Those of a GPU belong to backend "nccl", which is torch's own and which `prepare` takes
for its strategies there; so the tests of ``tests/ranks/process_group`` do not run here again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ring_notebook.torch as hvd

pytestmark = pytest.mark.sizes(2)

CALLS: dict[str, Callable[[Tensor, int], object]] = {
    "DistributedDataParallel": lambda x, _: nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(x.device)),
    "all_reduce": lambda x, _: dist.all_reduce(x),
    "all_reduce of the host's and the device's": lambda x, _: dist.all_reduce_coalesced([torch.ones(2), x]),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
    "reduce": lambda x, _: dist.reduce(x, 0),
    "all_gather": lambda x, _: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
    "all_gather to the host": lambda x, _: dist.all_gather([torch.empty(2), torch.empty(2)], x),
    "all_gather_into_tensor": lambda x, _: dist.all_gather_into_tensor(torch.cat([x, x]), x),
    "reduce_scatter_tensor": lambda x, _: dist.reduce_scatter_tensor(x[:1].clone(), x),
    "all_to_all_single": lambda x, _: dist.all_to_all_single(torch.empty_like(x), x),
    "send and recv": lambda x, rank: dist.recv(x, 0) if rank else dist.send(x, 1),
}


@pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_a_device_are_refused(name: str, rank: int, device: torch.device) -> None:
    hvd.init()
    try:
        hvd.process_group()
        with pytest.raises(ValueError, match=f"rank {rank}: .*on {device}; .*backend 'nccl'"):
            CALLS[name](torch.ones(2, device=device), rank)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2, 2]
    finally:
        dist.destroy_process_group()
        hvd.shutdown()
