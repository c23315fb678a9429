"""ring.counts: what operations a rank has carried out and sent."""

from __future__ import annotations

from types import ModuleType

import torch


def test_counts_of_a_process_set(hvd: ModuleType) -> None:
    """Each operation counts once on every rank, whatever starts it; on one host nothing is sent."""
    before = hvd.counts()
    hvd.allreduce(torch.ones(3))
    hvd.synchronize(hvd.allreduce_async_(torch.ones(3)))
    hvd.synchronize(hvd.allreduce_async_(torch.ones(3), name="named"))
    hvd.barrier()
    did = hvd.counts() - before
    assert did.operations == 4
    assert did.gates >= 4
    assert (did.messages, did.bytes) == (0, 0)
