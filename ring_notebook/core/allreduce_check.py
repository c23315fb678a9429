"""A rank of the doctor's measurement: ``python -m ring_notebook.core.allreduce_check SECONDS``.

Rank 0 prints a line of JSON: the numbers of ``ranks`` and ``hosts``; ``rate`` of an allreduce in ring memory; and, on
one host, ``memory``, the rate at which all ranks together read and write. Rates are in bytes per second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from ring_notebook.core import world
from ring_notebook.core.buffers import Buffer, DType, from_memoryview
from ring_notebook.core.communicator import Communicator, ReduceOp

_LEAST, _TOGETHER = 16 << 20, 128 << 20  # bytes of each rank, and of all ranks of a host: more than caches hold
_FEWEST, _MOST = 3, 1000  # calls


def main() -> None:
    """Measure for the seconds that ``sys.argv`` names."""
    seconds = float(sys.argv[1])
    world.init()
    here = world.current()
    communicator = here.communicator
    nbytes = max(_LEAST, _TOGETHER // int(_largest(communicator, here.local_size)))
    region = communicator.empty(nbytes)
    values = np.frombuffer(memoryview(region), np.float32)
    values[:] = 1.0
    buffer = Buffer(region.address, (values.size,), DType.FLOAT32, region)
    hosts = len(set(here.hosts))
    measured: dict[str, float] = {"ranks": here.size, "hosts": hosts}
    took = _median_time(communicator, lambda: communicator.allreduce([buffer], [buffer], op=ReduceOp.AVERAGE), seconds)
    measured["rate"] = nbytes / took
    if hosts == 1:
        took = _median_time(communicator, lambda: np.multiply(values, 1.0, out=values), seconds / 4)
        measured["memory"] = 2 * nbytes * here.size / took
    if here.rank == 0:
        os.write(1, json.dumps(measured).encode() + b"\n")


def _median_time(communicator: Communicator, call: Callable[[], object], seconds: float) -> float:
    """The median time of a call in seconds, on the rank where it is largest."""
    times: list[float] = []
    calls = _FEWEST
    while len(times) < calls:
        communicator.barrier()
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
        if len(times) == _FEWEST:  # all ranks make the same number of calls
            calls = min(_MOST, max(_FEWEST, int(seconds / _largest(communicator, min(times)))))
    return _largest(communicator, median(times))


def _largest(communicator: Communicator, value: float) -> float:
    array = np.array([value])
    buffer = from_memoryview(array)
    communicator.allreduce([buffer], [buffer], op=ReduceOp.MAX)
    return float(array[0])


if __name__ == "__main__":
    main()
