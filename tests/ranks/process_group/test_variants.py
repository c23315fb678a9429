"""What else torch does with a process group: ways of DistributedDataParallel, sharded optimizers, compiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.sizes(3),
    pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The TorchScript:DeprecationWarning"),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, rank: int, make: Callable[..., Any] = torch.optim.SGD) -> Tensor:
    """The parameters after three steps."""
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain(rank: int) -> Tensor:
    return train(DistributedDataParallel(network()), rank)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_options(option: str, rank: int) -> None:
    model = DistributedDataParallel(network(), **{option: True})
    torch.testing.assert_close(train(model, rank), plain(rank))


def low_rank() -> powerSGD_hook.PowerSGDState:
    """With matrices of full rank, so that nothing is lost but digits."""
    return powerSGD_hook.PowerSGDState(None, 16, start_powerSGD_iter=2, min_compression_rate=0.1)


@pytest.mark.parametrize(
    ("hook", "make_state"),
    [
        (default_hooks.fp16_compress_hook, lambda: None),
        (powerSGD_hook.powerSGD_hook, low_rank),
    ],
    ids=["fp16", "powersgd"],
)
def test_hooks_that_compress(hook: Any, make_state: Callable[[], Any], rank: int) -> None:
    model = DistributedDataParallel(network())
    model.register_comm_hook(make_state(), hook)
    torch.testing.assert_close(train(model, rank), plain(rank), atol=0.02, rtol=0.1)


def test_accumulated_gradients(rank: int, size: int) -> None:
    """Those of passes within no_sync stay on their rank until the pass behind it."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    inputs = torch.full((1, 2), rank + 1.0)
    with model.no_sync():
        model(inputs).backward()
        assert model.module.weight.grad.tolist() == [[rank + 1.0] * 2]
    model(inputs).backward()
    assert model.module.weight.grad.tolist() == [[size + 1.0] * 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_optimizer_in_shares(rank: int) -> None:
    """ZeroRedundancyOptimizer: each rank updates its share, and the state can be put together."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns when it is imported

    def in_shares(parameters: Any, lr: float) -> ZeroRedundancyOptimizer:
        made.append(ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr))
        return made[0]

    made: list[ZeroRedundancyOptimizer] = []
    whole = train(DistributedDataParallel(network()), rank, torch.optim.Adam)
    torch.testing.assert_close(train(DistributedDataParallel(network()), rank, in_shares), whole)
    made[0].consolidate_state_dict(0)
    if rank == 0:
        assert len(made[0].state_dict()["state"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled(compiler: str, rank: int, size: int) -> None:
    """The compiler meets Python functions of ours in the forward pass, where C++ broadcasts buffers."""
    torch._dynamo.reset()
    with_buffers = nn.Sequential(network(), nn.BatchNorm1d(4))
    model = torch.compile(DistributedDataParallel(with_buffers), backend=compiler)
    trained = train(model, rank)
    alike = [torch.empty_like(trained) for _ in range(size)]
    dist.all_gather(alike, trained)
    for other in alike:
        torch.testing.assert_close(other, trained)
