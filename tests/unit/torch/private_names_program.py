"""What each of two ranks does while torch lacks the private names that its arguments list."""

from __future__ import annotations

import sys
import warnings

from ring_notebook.torch_private import PRIVATE_NAMES, private

for absent in sys.argv[1:]:
    PRIVATE_NAMES[absent] = "torch:this_name_is_absent"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ring_notebook.torch as hvd  # noqa: E402
from ring_notebook.core import other_waits, world  # noqa: E402
from ring_notebook.torch.process_group.foreign_time import count_foreign_time  # noqa: E402
from ring_notebook.torch.tensors import copy_each, multiply_each  # noqa: E402

warnings.simplefilter("ignore")  # torch's own, of what is on its way out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, rank: int) -> list[Tensor]:
    """The gradients of one step, which are those of all ranks."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def averages(rank: int) -> list[Tensor]:
    """What `step` has to give, by collectives of ours."""
    return [hvd.allreduce(grad) for grad in step(network(), rank)]


def check_backend_ring(rank: int) -> None:
    dist.init_process_group("ring")
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 3
    dist.all_reduce(ones, async_op=True).get_future().wait()
    assert ones.tolist() == [4.0] * 3
    expected = averages(rank)
    # Several buckets, so that some are started amid the backward pass.
    torch.testing.assert_close(step(DistributedDataParallel(network(), bucket_cap_mb=0.0001), rank), expected)
    compiled = torch.compile(DistributedDataParallel(network()), backend="eager")
    torch.testing.assert_close(step(compiled, rank), expected)
    dist.destroy_process_group()


def check_other_backend(rank: int) -> None:
    """Gloo, whose waits count as in a cell."""
    count_foreign_time()
    other_waits.begin()
    other_waits.keep()
    hvd.process_group("gloo")
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    dist.monitored_barrier()
    torch.testing.assert_close(step(DistributedDataParallel(network()), rank), averages(rank))
    assert other_waits.take()
    assert hvd.process_group("ring") is dist.group.WORLD  # ends the one of Gloo


def check_failed_generation(rank: int) -> None:
    """Groups of other backends end where a rank has failed, and the next ones come about."""
    hvd.process_group("gloo")
    dist.new_group(backend="gloo")
    if rank == 0:
        world.abort("rank 0 has had enough")
    try:
        hvd.barrier()
    except hvd.HorovodInternalError:
        pass
    else:
        raise AssertionError("the generation has been aborted")
    hvd.shutdown()
    assert not dist.is_initialized()
    hvd.init()
    hvd.process_group("gloo")
    dist.all_reduce(torch.ones(2))


def check_clipping(rank: int) -> None:
    """Gradients are averages after `backward`, or where torch does not say when a pass ends, in the step."""
    ends_are_seen = private("at_end_of_backward") is not None and private("current_graph_task") is not None
    model, expected = network(), averages(rank)
    model, optimizer = hvd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        found = step(model, rank)
        if ends_are_seen and _ == 0:
            torch.testing.assert_close(found, expected)
        hvd.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    hvd.check(model)


def check_tensors() -> None:
    values = [torch.ones(2), torch.ones(3)]
    multiply_each(values, 3.0)
    targets = [torch.zeros(2), torch.zeros(3)]
    copy_each(targets, values)
    assert [target.tolist() for target in targets] == [[3.0] * 2, [3.0] * 3]


def main() -> None:
    check_tensors()
    hvd.init()
    rank = hvd.rank()
    check_clipping(rank)
    check_backend_ring(rank)
    check_other_backend(rank)
    check_failed_generation(rank)
    hvd.shutdown()
    sys.stdout.write("all is well\n")


if __name__ == "__main__":
    main()
