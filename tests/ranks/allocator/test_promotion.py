"""Large ordinary tensors in ranks that we start: when they lie in ring memory, and that nobody can tell."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted

pytestmark = pytest.mark.sizes(2, 3, slow=(4,))  # alone, nothing is reduced

COUNT = 300_001  # 1.2 MB of float32, and no multiple of anything


def lies_in_ring(tensor: Tensor) -> bool:
    """Whether the first byte of a tensor is in ring memory, as the kernel sees it."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return "memfd:ring " in line
    return False


def promoted(hvd: ModuleType, count: int = COUNT) -> Tensor:
    """A tensor of ones in a promoted block; its address is what it was before."""
    tensor = torch.zeros(count)
    address = tensor.data_ptr()
    for _ in range(3):
        hvd.allreduce_(tensor)
    assert lies_in_ring(tensor)
    assert tensor.data_ptr() == address
    return tensor.fill_(1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A forked child cannot use the threads that torch has started in its parent."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sums_are_those_of_ordinary_tensors(hvd: ModuleType, rank: int) -> None:
    """To the last bit, before a tensor moves and after."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(COUNT, generator=generator)
    ordinary = torch.empty(COUNT + 1)[1:].copy_(values)  # a part of a block stays where it is
    expected = hvd.allreduce_(ordinary, op=hvd.Sum)
    assert not lies_in_ring(ordinary)
    tensor = torch.empty(COUNT)
    for _ in range(4):
        tensor.copy_(values)
        assert torch.equal(hvd.allreduce_(tensor, op=hvd.Sum), expected)
    assert lies_in_ring(tensor)


def test_a_list_of_large_and_small_tensors(hvd: ModuleType, rank: int) -> None:
    """As a bucket of gradients: weights in ring memory, and what is too small for that copied there."""
    shapes = [(700, 999), (999,), (3,), (512, 513), ()]
    for step in range(4):
        tensors = [torch.full(shape, float(rank + number + step)) for number, shape in enumerate(shapes)]
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        for number, tensor in enumerate(tensors):
            expected = sum(other + number + step for other in range(hvd.size()))
            assert bool((tensor == expected).all()), (step, number)
    assert lies_in_ring(tensors[0])
    outputs = hvd.grouped_allreduce([torch.full((700, 999), 2.0), torch.ones(3)], op=hvd.Sum)
    assert [float(output.max()) for output in outputs] == [2.0 * hvd.size(), hvd.size()]


def test_a_list_in_which_one_rank_has_joined(hvd: ModuleType, rank: int) -> None:
    tensors = [promoted(hvd), torch.ones(5)]
    if rank == 0:
        hvd.join()
    else:
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        assert [float(tensor.min()) for tensor in tensors] == [hvd.size() - 1.0] * 2
        hvd.join()


def test_gradients_stay_in_ring_memory_from_step_to_step(hvd: ModuleType) -> None:
    model = nn.Linear(600, 600)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    places = []
    for _ in range(8):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 600)).sum().backward()
        assert model.weight.grad is not None
        places.append(lies_in_ring(model.weight.grad))
        optimizer.step()
    assert all(places[4:])


def test_tensors_in_ring_memory_do_what_tensors_do(hvd: ModuleType, tmp_path: Path) -> None:
    tensor = promoted(hvd)
    torch.save(tensor, tmp_path / "saved")
    assert torch.equal(torch.load(tmp_path / "saved"), tensor)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    view = tensor.numpy()
    tensor.add_(1)
    del tensor
    other = [torch.zeros(COUNT) for _ in range(4)]
    assert float(view.min()) == float(view.max()) == 2.0, "memory that a numpy view holds was given to another tensor"
    del view, other

    shared = promoted(hvd).share_memory_()
    assert shared.is_shared()
    assert float(hvd.allreduce_(shared, op=hvd.Sum).min()) == hvd.size()

    resized = promoted(hvd)
    resized.resize_(2 * COUNT)
    assert float(resized[:COUNT].min()) == 1.0
    resized[COUNT:] = 1
    assert float(hvd.allreduce_(resized, op=hvd.Sum).min()) == hvd.size()


def test_threads_allocate_while_others_reduce(hvd: ModuleType) -> None:
    stop = threading.Event()
    wrong: list[int] = []

    def allocate(seed: int) -> None:
        held: list[tuple[int, Tensor]] = []
        number = 0
        while not stop.is_set():
            number += 1
            held.append((number, torch.full((COUNT - 7 * (number % 5) - seed,), float(number))))
            if len(held) > 3:
                expected, tensor = held.pop(number % 3)
                if float(tensor[0]) != expected or float(tensor[-1]) != expected:
                    wrong.append(seed)

    threads = [threading.Thread(target=allocate, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for step in range(60):
        gradients = [torch.full((COUNT,), float(step)), torch.full((COUNT - 7,), float(step))]
        handles = [hvd.allreduce_async_(gradient, op=hvd.Sum) for gradient in gradients]
        for handle in handles:
            assert float(hvd.synchronize(handle).min()) == step * hvd.size()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tensor_that_is_reduced_twice_at_once(hvd: ModuleType) -> None:
    """The second operation is queued while the first one writes: it moves nothing before that has ended."""
    for count in range(COUNT + 5000, COUNT + 400_000, 50_000):  # each of a size that has not been reduced before
        tensor = torch.ones(count)
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum) for _ in range(3)]
        for handle in handles:
            hvd.synchronize(handle)
        assert float(tensor.min()) == float(tensor.max()) == hvd.size() ** 3


def test_an_abort_while_tensors_are_in_ring_memory(hvd: ModuleType, rank: int) -> None:
    tensor = promoted(hvd)
    if rank == 0:
        # Not before: the others may still be in the operations that have promoted it.
        while not all(entry["name"] == "abandoned" for entry in world.snapshot() if entry["rank"] != rank):
            time.sleep(0.01)
        world.abort("rank 0 gives up")
    else:
        with pytest.raises(CollectiveAborted, match="rank 0 gives up"):
            hvd.allreduce_(tensor, name="abandoned")
    hvd.init()
    assert lies_in_ring(tensor)
    assert float(hvd.allreduce_(tensor.fill_(1), op=hvd.Sum).min()) == hvd.size()


def test_the_end_of_an_epoch_gives_free_memory_back(hvd: ModuleType) -> None:
    tensors = [promoted(hvd) for _ in range(3)]
    domain = world.prepare_host().domain
    assert domain.tensors()["promoted"] >= 3 * 4 * COUNT
    del tensors
    assert domain.tensors()["cached"] > 0
    hvd.shutdown()
    assert domain.tensors()["cached"] == 0
    hvd.init()


def test_programs_of_a_rank_have_the_allocator_of_their_system(hvd: ModuleType) -> None:
    assert "_preload.so" not in os.environ.get("LD_PRELOAD", "")
    assert "_preload.so" in Path("/proc/self/maps").read_text()
