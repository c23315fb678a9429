"""What the benchmarks compare with, and how they start it."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

import ring_notebook.torch as ring

__all__ = ["start_gloo"]


def start_gloo() -> None:
    """torch.distributed on Gloo over loopback, among the ranks that are running."""
    if dist.is_initialized():
        return
    port = 0
    if ring.rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ring.broadcast_object(port)))
    dist.init_process_group("gloo", rank=ring.rank(), world_size=ring.size())
