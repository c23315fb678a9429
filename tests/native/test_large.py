"""Tensors of more elements than 32 bits count. Slow: they move 4 GiB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from native.ranks import Seat, as_threads
from ring_notebook.core.buffers import from_memoryview

COUNT = (1 << 31) + 4097


def available() -> int:
    """Bytes that the machine can spare."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ring_memory", [True, False])
def test_more_than_2_to_the_31_elements(ring_memory: bool) -> None:
    """Allreduce and broadcast in place, in ring memory and staged; the ends and the 2^31st element are right."""
    if available() < 3 * COUNT:
        pytest.skip(f"NOT TESTED: {COUNT} elements on two ranks need {3 * COUNT >> 30} GiB of free memory")
    places = [0, 1, (1 << 31) - 1, 1 << 31, COUNT - 1]

    def body(seat: Seat) -> None:
        ring = seat.open()
        memory = ring.empty(COUNT) if ring_memory else np.empty(COUNT, np.uint8)
        tensor = np.ndarray(COUNT, np.uint8, buffer=memory)
        tensor[:] = 0
        tensor[places] = [place % 50 + seat.rank for place in range(5)]
        buffer = from_memoryview(tensor)
        ring.allreduce([buffer], [buffer])
        assert tensor[places].tolist() == [2 * (place % 50) + 1 for place in range(5)]
        assert int(np.count_nonzero(tensor)) == 5
        tensor[places] = seat.rank
        ring.broadcast(buffer, buffer, 1)
        assert tensor[places].tolist() == [1] * 5

    as_threads(2, body, limit=240.0, arena=COUNT + (16 << 20))
