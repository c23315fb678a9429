"""Every parallelism of PyTorch on backend "ring" beside Gloo: the same parameters after some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import checkpoint, pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ring_notebook.torch as hvd

pytestmark = [
    pytest.mark.usefixtures("groups"),
    pytest.mark.filterwarnings("ignore"),
]  # torch's own, of its newer parts
CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, norm: float = 0.0) -> None:
    """Three steps, with gradients clipped to ``norm`` where it is given."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).float(), labels).backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()


def whole(parameters: Iterable[Any]) -> list[Tensor]:
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in parameters]


def ddp(group: Any, hook: Any = None, state: object = None, **options: Any) -> list[Tensor]:
    model = DistributedDataParallel(network(), process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    train(model)
    return whole(model.parameters())


def ddp_in_half_precision(group: Any) -> list[Tensor]:
    return ddp(group, fp16_compress_hook, group)


def ddp_by_power_sgd(group: Any) -> list[Tensor]:
    """With matrices of full rank, so that nothing is lost but digits."""
    return ddp(group, powerSGD_hook, PowerSGDState(group, 16, start_powerSGD_iter=2, min_compression_rate=0.1))


def accumulated(group: Any) -> list[Tensor]:
    """Gradients of passes within no_sync stay on their rank until the pass behind it."""
    model = DistributedDataParallel(network(), process_group=group)
    with model.no_sync():
        model(batch(0)[0]).sum().backward()
        own = [parameter.grad.clone() for parameter in model.parameters()]
    model(batch(1)[0]).sum().backward()
    return [*own, *(parameter.grad for parameter in model.parameters())]


def in_shares(group: Any) -> list[Tensor]:
    """Each rank updates its share, and the state can be put together."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns when it is imported

    model = DistributedDataParallel(network(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    return [*whole(model.parameters()), *(state[key]["exp_avg"] for key in sorted(state))]


def compiled_ddp(group: Any, backend: str = "aot_eager") -> list[Tensor]:
    """The compiler meets Python functions of ours in the forward pass, where C++ broadcasts buffers."""
    torch._dynamo.reset()
    with_buffers = nn.Sequential(network(), nn.BatchNorm1d(4))
    model = torch.compile(DistributedDataParallel(with_buffers, process_group=group), backend=backend)
    train(model)
    return whole(model.parameters())


def averaged(group: Any) -> list[Tensor]:
    """Ranks train alone and average their parameters now and then."""
    model = network()
    averager = PeriodicModelAverager(period=1, process_group=group)
    for _ in range(2):
        train(model)
        averager.average_parameters(model.parameters())
    return whole(model.parameters())


def fsdp1(group: Any) -> list[Tensor]:
    model = FullyShardedDataParallel(network(), process_group=group, device_id=CPU)
    train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return whole(model.parameters())


def fsdp2(group: Any) -> list[Tensor]:
    model, mesh = network(), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return whole(model.parameters())


def fsdp2_in_bfloat16(group: Any) -> list[Tensor]:
    """Gradients are reduced in float32, and clipped."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(network(), mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    train(model, norm=0.1)
    return whole(model.parameters())


def hybrid(group: Any) -> list[Tensor]:
    """Replicas of shards, on four ranks; on fewer there is one replica."""
    size = dist.get_world_size(group)
    replicas = 2 if size == 4 else 1
    backend = dist.get_backend(group)
    mesh = init_device_mesh(
        "cpu",
        (replicas, size // replicas),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": backend, "shard": backend},
    )
    model = fully_shard(network(), mesh=mesh)
    train(model)
    return whole(model.parameters())


def tensor_parallel(group: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
    return whole(model.parameters())


def redistributed(group: Any) -> list[Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = distribute_tensor(torch.arange(48.0).view(-1, 4), mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    return [
        columns.to_local(),
        columns.redistribute(placements=[Replicate()]).to_local(),
        (rows @ rows.T).full_tensor(),
    ]


def pipeline(schedule: str, stages_of_a_rank: int = 1) -> Callable[[Any], list[Tensor]]:
    def run(group: Any) -> list[Tensor]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:  # torch has no pipeline of one rank
            return []
        torch.manual_seed(rank)
        parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(stages_of_a_rank)]
        count = size * stages_of_a_rank
        stages = [PipelineStage(part, rank + size * i, count, CPU, group=group) for i, part in enumerate(parts)]
        made = getattr(pipelining, schedule)
        given: Any = stages[0] if stages_of_a_rank == 1 else stages
        plan = made(given, 2 * size, loss_fn=lambda out, target: (out - target).square().mean())
        generator, losses = torch.Generator().manual_seed(5), list[Tensor]()
        for _ in range(2):
            inputs, target = (
                torch.randn(4 * size, 16, generator=generator),
                torch.randn(4 * size, 16, generator=generator),
            )
            if rank == 0:
                plan.step(inputs)
            elif rank == size - 1:
                plan.step(target=target, losses=losses)
            else:
                plan.step()
        return [parameter.grad.clone() for part in parts for parameter in part.parameters()] + losses

    return run


def compiled(group: Any) -> list[Tensor]:
    """Functional collectives within a compiled function."""

    def gathered(tensor: Tensor) -> Tensor:
        summed = functional.all_reduce(tensor * 2, "sum", group)
        return functional.all_gather_tensor(summed + 1, 0, group).sum(0)

    torch._dynamo.reset()
    return [torch.compile(gathered, backend="aot_eager", fullgraph=True)(torch.ones(4) * (dist.get_rank() + 1))]


CASES: dict[str, Callable[[Any], list[Tensor]]] = {
    **{
        case.__name__: case
        for case in (
            ddp_in_half_precision,
            ddp_by_power_sgd,
            accumulated,
            in_shares,
            compiled_ddp,
            averaged,
            fsdp1,
            fsdp2,
            fsdp2_in_bfloat16,
            hybrid,
            tensor_parallel,
            redistributed,
            compiled,
        )
    },
    "ddp": partial(ddp, bucket_cap_mb=0.01),
    "ddp_static": partial(ddp, static_graph=True),
    "compiled_by_inductor": partial(compiled_ddp, backend="inductor"),
    "gpipe": pipeline("ScheduleGPipe"),
    "1f1b": pipeline("Schedule1F1B"),
    "interleaved": pipeline("ScheduleInterleaved1F1B", 2),
    "zero_bubble": pipeline("ScheduleInterleavedZeroBubble", 2),
    "looped": pipeline("ScheduleLoopedBFS", 2),
}


SLOW = ("in_shares", "compiled_ddp", "compiled_by_inductor")
LOSSY = ("ddp_in_half_precision", "ddp_by_power_sgd")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_as_on_gloo(groups: tuple[Any, Any], name: str, size: int) -> None:
    """Bit by bit on two ranks; on more a sum is of another order."""
    ours, theirs = (CASES[name](group) for group in groups)
    tolerance = 0.0 if size <= 2 else 2e-2 if name in LOSSY else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.sizes(3, slow=(2,))
def test_a_checkpoint_that_is_saved_meanwhile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch.distributed.checkpoint writes in a thread, on a group of its own, while the ranks train."""
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("saved")) if dist.get_rank() == 0 else None, 0)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(network())
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model, optimizer = made()
    train(model, optimizer)
    saved = whole(model.parameters())
    saving = checkpoint.async_save(state(model, optimizer), checkpoint_id=folder, process_group=dist.new_group())
    train(model, optimizer)
    saving.result()
    other, its_optimizer = made()
    loaded = state(other, its_optimizer)
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    torch.testing.assert_close(whole(other.parameters()), saved, rtol=0.0, atol=0.0)
