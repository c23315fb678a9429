"""What an engine asks for before a cell: waits in other backends count, and those end that look at nothing."""

from __future__ import annotations

from ring_notebook.torch.process_group.run_groups.foreign_time import count_foreign_time
from ring_notebook.torch.process_group.run_groups.gloo_connect import watch_connecting

__all__ = ["watch_waits"]


def watch_waits() -> None:
    """Change what waits in other backends, as `count_foreign_time` and `watch_connecting` say; once."""
    count_foreign_time()
    watch_connecting()
