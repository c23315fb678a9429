"""Arguments that cannot be right: an error that says so on every rank, before anything is sent, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROWS = 4


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)


Call = Callable[[ModuleType, Tensor], object]


def wrapped(**options: Any) -> Call:
    return lambda hvd, _: hvd.DistributedOptimizer(sgd(), **options)


WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "allreduce of text": (lambda hvd, t: hvd.allreduce("x"), TypeError, "takes torch tensors, got str"),
    "allreduce of a list": (lambda hvd, t: hvd.allreduce_([t]), TypeError, "takes torch tensors, got list"),
    "complex": (lambda hvd, t: hvd.allreduce(t + 1j), TypeError, "cannot handle torch.complex64"),
    "sparse": (lambda hvd, t: hvd.allreduce(t.to_sparse()), TypeError, "use sparse_allreduce_async"),
    "an op by number": (lambda hvd, t: hvd.allreduce(t, op=17), ValueError, "Product, got 17"),
    "an op by name": (lambda hvd, t: hvd.allreduce_async(t, op="Sum"), ValueError, "op must be one of Average, Sum"),
    "average and op": (
        lambda hvd, t: hvd.allreduce(t, average=True, op=hvd.Sum),
        ValueError,
        "either average or op",
    ),
    "compression": (lambda hvd, t: hvd.allreduce(t, compression="fp16"), TypeError, "compression must be"),
    "no list": (lambda hvd, t: hvd.grouped_allreduce(t), TypeError, "takes a list of tensors, got a Tensor"),
    "a list of texts": (lambda hvd, t: hvd.grouped_allreduce_async_([t, "x"]), TypeError, "tensors, got str"),
    "gathering no list": (lambda hvd, t: hvd.grouped_allgather_async(3), TypeError, "a list of tensors, got a int"),
    "gathering half a list": (lambda hvd, t: hvd.grouped_allgather([t, 3]), TypeError, "tensors, got int"),
    "scattering half a list": (lambda hvd, t: hvd.grouped_reducescatter([t, 3]), TypeError, "tensors, got int"),
    "sparse of dense": (lambda hvd, t: hvd.sparse_allreduce_async(t, "n", hvd.Sum), TypeError, "takes a sparse COO"),
    "sparse minimum": (
        lambda hvd, t: hvd.sparse_allreduce_async(t.to_sparse(), "n", hvd.Min),
        ValueError,
        "can Average or Sum",
    ),
    "allgather of a number": (lambda hvd, t: hvd.allgather(3), TypeError, "takes torch tensors, got int"),
    "root that is not there": (lambda hvd, t: hvd.broadcast(t, 99), ValueError, "root_rank=99 is not in process set 0"),
    "root as text": (lambda hvd, t: hvd.broadcast_(t, "0"), ValueError, "root_rank='0' is not in process set 0"),
    "root of an object": (lambda hvd, t: hvd.broadcast_object(1, -1), ValueError, "root_rank=-1 is not in process set"),
    "too many splits": (lambda hvd, t: hvd.alltoall(t, [0] * hvd.size() + [ROWS]), ValueError, "rows, none negative"),
    "more splits than rows": (lambda hvd, t: hvd.alltoall(t, [5] * hvd.size()), ValueError, "rows, none negative"),
    "negative splits": (lambda hvd, t: hvd.alltoall(t, [-1] * hvd.size()), ValueError, "rows, none negative"),
    "splits of halves": (lambda hvd, t: hvd.alltoall(t, [1.5] * hvd.size()), ValueError, "must be integers"),
    "alltoall of a scalar": (lambda hvd, t: hvd.alltoall(t.sum()), ValueError, "the tensor has none"),
    "reducescatter of a scalar": (lambda hvd, t: hvd.reducescatter(t.sum()), ValueError, "the tensor has none"),
    "reducescatter by Adasum": (
        lambda hvd, t: hvd.reducescatter(t, op=hvd.Adasum),
        NotImplementedError,
        "use Average or Sum, or allreduce",
    ),
    "broadcast of nothing": (lambda hvd, t: hvd.broadcast(None, 0), TypeError, "takes torch tensors, got NoneType"),
    "process set as list": (lambda hvd, t: hvd.allreduce(t, process_set=[0]), TypeError, "must be a ProcessSet"),
    "barrier of a number": (lambda hvd, t: hvd.barrier(3), TypeError, "must be a ProcessSet"),
    "counts of a number": (lambda hvd, t: hvd.counts(3), TypeError, "process_set must be a ProcessSet"),
    "broadcast in a list": (lambda hvd, t: hvd.broadcast(t, 0, process_set=[0]), TypeError, "must be a ProcessSet"),
    "gather in a list": (lambda hvd, t: hvd.allgather_async(t, process_set=[0]), TypeError, "must be a ProcessSet"),
    "alltoall in a list": (lambda hvd, t: hvd.alltoall(t, process_set=[0]), TypeError, "must be a ProcessSet"),
    "a set that is not registered": (
        lambda hvd, t: hvd.allgather(t, process_set=hvd.ProcessSet([0])),
        ValueError,
        "is not registered in this run",
    ),
    "poll": (lambda hvd, t: hvd.poll(3), TypeError, "takes the handle that an _async collective returned"),
    "synchronize": (lambda hvd, t: hvd.synchronize(None), TypeError, "takes the handle"),
    "parameters": (lambda hvd, t: hvd.broadcast_parameters(3, 0), ValueError, "takes a dict or a list of tensors"),
    "optimizer state": (lambda hvd, t: hvd.broadcast_optimizer_state(3, 0), TypeError, "a torch.optim.Optimizer"),
    "no optimizer": (lambda hvd, t: hvd.DistributedOptimizer(3), TypeError, "takes a torch.optim.Optimizer, got int"),
    "op of an optimizer": (lambda hvd, t: hvd.DistributedOptimizer(sgd(), op=hvd.Min), ValueError, "Average, Sum or"),
    "no passes": (wrapped(backward_passes_per_step=0), ValueError, "must be at least 1"),
    "fewer passes": (
        lambda hvd, t: hvd.DistributedOptimizer(sgd()).set_backward_passes_per_step(0),
        ValueError,
        "must be at least 1",
    ),
    "compression of an optimizer": (wrapped(compression="fp16"), TypeError, "compression must be"),
    "predivide by nothing": (wrapped(gradient_predivide_factor=0), ValueError, "must be positive"),
    "predivide of a sum": (
        lambda hvd, t: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
        "gradient_predivide_factor",
    ),
    "groups": (wrapped(num_groups=-1), ValueError, "must not be negative"),
    "an optimizer's process set": (wrapped(process_set=[0]), TypeError, "must be a ProcessSet"),
    "a tensor of zeros that are nowhere": (
        lambda hvd, t: hvd.allreduce_(torch._efficientzerotensor(5)),
        TypeError,
        "has no memory of its own",
    ),
    "a meta tensor": (lambda hvd, t: hvd.allreduce(torch.ones(3, device="meta")), TypeError, "no memory of its own"),
    "a tensor twice": (
        lambda hvd, t: hvd.grouped_allreduce_([t, t]),
        ValueError,
        "its tensors 0 and 1 .* share memory",
    ),
    "tensors that overlap": (
        lambda hvd, t: hvd.grouped_allreduce_([t[1:], t.clone(), t[:-1]]),
        ValueError,
        "its tensors 0 and 2",
    ),
    "channels": (lambda hvd, t: hvd.SyncBatchNorm(4)(torch.ones(3, 5)), ValueError, "4 channels, got 5"),
    "elastic no function": (lambda hvd, t: hvd.elastic.run(3), TypeError, "decorates a function, got int"),
    "elastic no state": (
        lambda hvd, t: hvd.elastic.run(sum)(3),
        TypeError,
        "takes an elastic.State first, got int",
    ),
    "a state's own name": (lambda hvd, t: hvd.elastic.TorchState(commit=3), ValueError, "needs commit itself"),
    "a set of text": (lambda hvd, t: hvd.ProcessSet("01"), TypeError, "a list of ranks or an mpi4py communicator"),
    "a set of nobody": (lambda hvd, t: hvd.add_process_set([99]), ValueError, "needs ranks within 0.."),
    "prepare nothing": (lambda hvd, t: hvd.prepare(), TypeError, "takes models, optimizers, loaders"),
    "prepare a number": (lambda hvd, t: hvd.prepare(3, sgd()), TypeError, "argument 1 is int 3"),
    "prepare a list": (lambda hvd, t: hvd.prepare(nn.Linear(1, 1), sgd(), [1]), TypeError, "argument 3 is list [1]"),
    "prepare a stranger": (
        lambda hvd, t: hvd.prepare(nn.Linear(1, 1), sgd()),
        ValueError,
        "SGD has no parameter of the models",
    ),
    "prepare two noises": (lambda hvd, t: hvd.prepare(sgd(), sgd(), noise_scale=1), TypeError, "one optimizer, got 2"),
    "check no model": (lambda hvd, t: hvd.check(3), TypeError, "takes a torch.nn.Module, got int"),
    "schedule": (lambda hvd, t: hvd.LinearScalingLR(3, 1), TypeError, "takes a torch.optim.Optimizer"),
    "empty": (lambda hvd, t: hvd.empty(-1), ValueError, "must not be negative"),
    "log": (lambda hvd, t: hvd.log(loss="x"), TypeError, "'loss' is not a number"),
    "log without a name": (lambda hvd, t: hvd.log(0.5), TypeError, "give metrics by name"),
    "half a pass": (
        wrapped(backward_passes_per_step=1.5),
        TypeError,
        "backward_passes_per_step must be an integer, got 1.5",
    ),
    "half a group": (wrapped(num_groups=1.5), TypeError, "num_groups must be an integer, got 1.5"),
    "a factor that is no number": (wrapped(gradient_predivide_factor=float("nan")), ValueError, "must be positive"),
    "a scale that is text": (lambda hvd, t: hvd.allreduce(t, prescale_factor="2"), TypeError, "must be a number"),
    "splits that are one": (lambda hvd, t: hvd.alltoall(t, splits=5), TypeError, "one integer per rank"),
    "a name that is none": (lambda hvd, t: hvd.allreduce(t, name=5), TypeError, "name must be a string"),
    "timeline nowhere": (
        lambda hvd, t: hvd.start_timeline("/no/such/t.json"),
        FileNotFoundError,
        "does not exist",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input(hvd: ModuleType, what: str) -> None:
    call, error, words = WRONG[what]
    with pytest.raises(error) as raised:
        call(hvd, torch.ones(ROWS))
    assert words in str(raised.value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_init_over_ranks_that_cannot_be(hvd: ModuleType) -> None:
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    for ranks, words in (
        ([0, 0], "must be distinct"),
        ([size], f"between 0 and {size - 1}"),
        ([other for other in range(size) if other != rank], "on the ranks of comm only"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.init(ranks)
    for one in (1.5, "1"):
        with pytest.raises(TypeError, match=f"whole numbers, got {one!r}"):
            hvd.init([0, one])
    hvd.init()


def test_an_object_that_cannot_be_sent_raises_on_every_rank(hvd: ModuleType) -> None:
    """On the rank that has it what pickle raises; the others do not wait for it."""
    last = hvd.size() - 1
    obj = (number for number in range(3)) if hvd.rank() == last else "fine"
    for send in (lambda: hvd.broadcast_object(obj, root_rank=last), lambda: hvd.allgather_object(obj)):
        if hvd.rank() == last:
            with pytest.raises(TypeError, match="generator"):
                send()
        else:
            with pytest.raises(RuntimeError, match=f"rank {hvd.rank()}: rank {last} failed to pickle its object"):
                send()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_a_file_in_the_way_of_a_checkpoint(hvd: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    if hvd.rank() == 0:
        with pytest.raises(OSError, match="file"):
            hvd.save(1, tmp_path / "file" / "checkpoint")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
