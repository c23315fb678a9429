"""Registers ``backend="ring"`` with torch.distributed; torch calls it during its import (entry point torch.backends).

It imports only what torch has imported already, so that ``import torch`` takes no longer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ring_notebook.torch_private import private


def register() -> None:
    """Register the backend, and the rendezvous of our ranks. May be called again."""
    distributed = import_module("torch.distributed")
    if not distributed.is_available() or "ring" in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend("ring", _create, extended_api=True, devices=["cpu"])
    if (handlers := private("rendezvous_handlers")) is not None:
        handlers["env"] = _rendezvous(handlers["env"])
    if (recording := private("self_recording_backends")) is not None:
        recording.add("ring")


def _create(opts: Any, options: Any) -> Any:
    return import_module("ring_notebook.torch.process_group.ring_process_group").create(opts, options)


def _rendezvous(otherwise: Any) -> Any:
    """``env://`` for our ranks; ``otherwise`` is torch's own, which opens a port on all interfaces."""

    def rendezvous(url: str, **kwargs: Any) -> Any:
        return import_module("ring_notebook.torch.process_group.run_store").rendezvous(url, otherwise, **kwargs)

    return rendezvous
