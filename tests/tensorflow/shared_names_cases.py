"""What Horovod's modules for TensorFlow and for Keras have in common; FACE says which of ours does it.

See harness/case_jobs.py. True for any number of ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ring_notebook.horovod.as_horovod import as_horovod

hvd = importlib.import_module(f"ring_notebook.{os.environ['FACE']}")


def summed(value) -> float:
    return float(hvd.allreduce(np.float32(value), op=hvd.Sum))


def case_ranks_and_sizes() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allgather_object((rank, size)) == [(r, size) for r in range(size)]
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)  # one host
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()


def case_init_and_shutdown_again_and_again() -> None:
    size = hvd.size()
    for turn in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="init"):
            hvd.rank()
        hvd.init(process_sets="dynamic" if turn else None)
        assert hvd.is_initialized()
        assert summed(turn) == turn * size


def case_what_it_was_built_with() -> None:
    assert not any(
        built()
        for built in (
            hvd.gloo_built,
            hvd.gloo_enabled,
            hvd.nccl_built,
            hvd.ddl_built,
            hvd.ccl_built,
            hvd.cuda_built,
            hvd.rocm_built,
        )
    )
    assert hvd.mpi_built()
    assert not hvd.mpi_enabled()  # `ringrun` needs none
    assert not hvd.mpi_threads_supported()


def case_reductions_by_their_constants() -> None:
    size, values = hvd.size(), np.arange(1.0, hvd.size() + 1)
    found = {
        name: float(hvd.allreduce(np.float64(hvd.rank() + 1), op=getattr(hvd, name)))
        for name in ("Average", "Sum", "Min", "Max", "Product")
    }
    expected = [values.mean(), values.sum(), 1, size, values.prod()]
    assert list(found.values()) == pytest.approx(expected)
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)  # as in Horovod
    own = np.eye(2)[hvd.rank() % 2]
    if size == 2:  # at right angles: parts add up
        np.testing.assert_allclose(np.asarray(hvd.allreduce(own, op=hvd.Adasum)), [1.0, 1.0])
    elif size & (size - 1):
        with pytest.raises(Exception, match="power of two"):
            hvd.allreduce(own, op=hvd.Adasum)


def case_process_sets_that_come_and_go() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.process_set_id == 0
    last = hvd.ProcessSet([size - 1])
    assert hvd.add_process_set(last) is last
    assert last.included() == (rank == size - 1)
    assert last.size() == 1
    assert last.rank() == (0 if rank == size - 1 else -1)
    if last.included():
        assert float(hvd.allreduce(np.float32(5), op=hvd.Sum, process_set=last)) == 5
    assert hvd.remove_process_set(last) is True
    assert hvd.remove_process_set(last) is False
    with pytest.raises(ValueError, match="not registered"):
        last.included()


def case_the_timeline_is_a_file_of_each_rank() -> None:
    path = Path(hvd.broadcast_object(tempfile.mkdtemp())) / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(np.ones(8), name="seen")
    hvd.stop_timeline()
    hvd.allreduce(np.ones(8), name="unseen")
    events = json.loads(path.with_name(f"timeline.rank{hvd.rank()}.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert any("seen" in name for name in names)
    assert not any("unseen" in name for name in names)


def case_objects_barrier_and_join() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    hvd.barrier()
    for _ in range(rank):
        hvd.allreduce(np.ones(2), op=hvd.Sum)
    assert hvd.join() == size - 1


def case_compressors_are_classes_of_their_module() -> None:
    with as_horovod():
        module = importlib.import_module("horovod.tensorflow.compression")
    assert module.Compression.none is module.NoneCompressor
    assert module.Compression.fp16 is module.FP16Compressor
    assert all(callable(getattr(module.Compressor, name)) for name in ("compress", "decompress"))
    tensor = importlib.import_module("tensorflow").constant([1.5, 2.5])
    for compressor, dtype in ((module.NoneCompressor, "float32"), (module.FP16Compressor, "float16")):
        small, context = compressor.compress(tensor)
        assert small.dtype.name == dtype
        back = compressor.decompress(small, context)
        assert back.dtype.name == "float32"
        np.testing.assert_array_equal(back, tensor)
    assert {"none", "fp16"} <= set(dir(hvd.Compression))


def case_what_only_pytorch_has_says_what_to_use() -> None:
    for name in ("save", "load"):
        with pytest.raises(AttributeError, match="rank 0 alone writes"):
            getattr(hvd, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = hvd.nothing


def case_errors_are_those_of_horovod() -> None:
    with as_horovod():
        theirs = importlib.import_module("horovod.common.exceptions")
    assert theirs.HorovodInternalError is hvd.HorovodInternalError
    assert theirs.HostsUpdatedInterrupt is hvd.HostsUpdatedInterrupt
    for error in (hvd.CollectiveMismatch, hvd.CollectiveAborted):
        assert issubclass(error, hvd.HorovodInternalError)
