"""Makes groups of Gloo so that an interrupt, or a rank that fails, ends the wait for ranks that do not connect."""

from __future__ import annotations

from functools import wraps
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ring_notebook.core import world
from ring_notebook.torch.process_group.stores.epoch_watch import EpochWatch

__all__ = ["are_connecting", "watch_connecting"]

_LOOK = 0.25  # seconds
_installed = False
_left: list[Thread] = []  # in Gloo's C++, whose callers have gone


def watch_connecting() -> None:
    """From now on have `ProcessGroupGloo` raise KeyboardInterrupt, and CollectiveAborted when a rank failed or left.

    Its C++ waits for each rank to connect, up to five times the group's timeout, and looks at nothing else. So another
    thread connects, which is left where it is when its caller raises: `end_foreign_waits` ends it. Does nothing the
    second time, and to groups that are made while no epoch is open.
    """
    global _installed
    if dist.is_gloo_available() and not _installed:
        _installed = True
        maker: Any = c10d.ProcessGroupGloo
        maker.__init__ = _in_another_thread(maker.__init__)


def are_connecting() -> bool:
    """Whether threads wait for ranks to connect although nobody waits for their groups."""
    _left[:] = [thread for thread in _left if thread.is_alive()]
    return bool(_left)


def _in_another_thread(original: Any) -> Any:
    @wraps(original)
    def init(self: c10d.ProcessGroupGloo, *args: Any, **options: Any) -> None:
        if not world.is_initialized():
            original(self, *args, **options)
            return
        errors: list[BaseException] = []
        made = Event()

        def make() -> None:
            try:
                original(self, *args, **options)
            except BaseException as error:
                errors.append(error)
            made.set()

        thread = Thread(target=make, name="ring-gloo-connect", daemon=True)
        watch = EpochWatch("other ranks to connect to it in Gloo")
        thread.start()
        try:
            while not made.wait(_LOOK):
                watch.check()
        except BaseException:
            _left.append(thread)
            raise
        if errors:
            raise errors[0]

    return init
