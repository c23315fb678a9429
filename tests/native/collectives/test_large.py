"""Tensors of more elements than 31 bits count and more bytes than 32 bits do. Slow: they move 4 GiB."""

from __future__ import annotations

import numpy as np
import pytest

from native.ranks import Seat, as_threads
from ring_notebook.core.buffers import from_memoryview
from ring_notebook.core.native import core

COUNT = (1 << 31) + 4098
BYTES = COUNT * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("hosts", "ring_memory"), [((), True), ((), False), ((0, 1), True)])
def test_more_than_2_to_the_31_elements(hosts: tuple[int, ...], ring_memory: bool) -> None:
    """Allreduce, broadcast and (on one host) reducescatter are right at both ends and past 31 and 32 bits."""
    if core.memory_left() < 3 * BYTES:
        pytest.skip(f"NOT TESTED: {BYTES >> 30} GiB on each of two ranks need {3 * BYTES >> 30} GiB of free memory")
    places = [0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, COUNT - 1]

    def body(seat: Seat) -> None:
        ring = seat.open()
        memory = ring.empty(BYTES) if ring_memory else np.empty(BYTES, np.uint8)
        tensor = np.ndarray(COUNT, np.int16, buffer=memory)
        tensor[:] = 0
        values = [1000 + index for index in range(len(places))]
        tensor[places] = [value + seat.rank for value in values]
        buffer = from_memoryview(tensor)
        ring.allreduce([buffer], [buffer])
        assert tensor[places].tolist() == [2 * value + 1 for value in values]
        assert int(np.count_nonzero(tensor)) == len(places)
        tensor[places] = seat.rank
        ring.broadcast(buffer, buffer, 1)
        assert tensor[places].tolist() == [1] * len(places)

        if hosts:  # a reducescatter between them needs ring memory for two chunks more
            return
        own = np.empty(COUNT // 2, np.int16)
        ring.reducescatter(buffer, from_memoryview(own))
        begin = seat.rank * len(own)
        expected = [place - begin for place in places if 0 <= place - begin < len(own)]
        assert np.flatnonzero(own).tolist() == expected
        assert set(own[expected].tolist()) == {2}

    as_threads(2, body, limit=540.0, arena=BYTES + (16 << 20), hosts=hosts)
