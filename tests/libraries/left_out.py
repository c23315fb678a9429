"""Which of PyTorch's own tests backend "ring" does not run, and why. PyTorch's decorators leave out others."""

from __future__ import annotations

import re

__all__ = ["LEFT_OUT", "reason_to_leave_out"]

LEFT_OUT = {
    r"cuda|_gpu$|nccl": "tensors on GPUs, streams, or NCCL: a matter of backend nccl",
    r"SyncBatchNorm|sync_bn|test_ddp_inference": "DDP refuses torch.nn.SyncBatchNorm on CPUs; ours has its own tests",
    r"native_mixed_precision|apply_optim_in_backward": "DDP takes a stream or an event of a GPU for it",
    r"test_ddp_device$": "asserts that DDP has moved its inputs from one GPU to another",
    r"test_average_parameters|monitored_barrier_allreduce_hang": "makes a group of backend nccl",
    r"test_ddp_profiling": "looks for what C++ backends alone write to torch's profiler; ours is in the timeline",
    r"barrier_timeout": "asserts words of Gloo's own error; tests/ranks/process_group asserts ours",
    r"monitored_barrier": "torch.distributed refuses monitored_barrier on any backend but Gloo",
    r"test_ddp_uneven_inputs$": "trains large convolutions for an hour on two cores; join has a test of its own",
}
"""Patterns of names, and why backend "ring" does not run what they match."""


def reason_to_leave_out(name: str) -> str:
    """Why ``name`` is not run; empty where it is."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, name)), "")
