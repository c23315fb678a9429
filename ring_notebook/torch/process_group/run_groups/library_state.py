"""What libraries over torch.distributed keep for the life of a process, and a cell that runs again must not find."""

from __future__ import annotations

import sys

from ring_notebook.torch.process_group.run_groups.default_group import end_groups

__all__ = ["forget_accelerate"]


def forget_accelerate() -> None:
    """Have accelerate, which Hugging Face's Trainer stands on, find the ranks of this run again."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    end_groups()
