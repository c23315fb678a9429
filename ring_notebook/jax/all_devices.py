"""JAX's own runtime over the ranks of a job, beside our collectives."""

from __future__ import annotations

import os
import socket

import jax
from ring_notebook.api.basics import rank, size
from ring_notebook.api.objects import broadcast_object
from ring_notebook.errors import RingError

_started = [False]  # JAX 0.5 does not say


def start_distributed(timeout: float = 300.0) -> None:
    """Start ``jax.distributed`` over all ranks: ``jax.devices()`` are then those of all of them.

    All ranks call this after ``init()`` and before they compute with JAX, which fixes its devices; in a notebook, once
    after the ranks have started. A ``jax.sharding.Mesh`` of these devices works as JAX's documentation says, and our
    collectives work on arrays of each rank's own devices. A rank that dies ends the job, or is named in the cell, as
    without it; an operation of JAX's own that waits for ever is ended with Ctrl-C. JAX does not
    encrypt what it sends: between hosts use a network that nobody else reaches. Beyond Horovod.

    timeout: seconds for all ranks to arrive.

    Raises RingError where JAX has been used before, or with another number of ranks.
    """
    if getattr(jax.distributed, "is_initialized", lambda: _started[0])():
        if jax.process_count() == size():
            return
        raise RingError(
            f"rank {rank()}: jax.distributed has {jax.process_count()} processes and the job {size()} ranks; start the "
            "ranks again"
        )
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # loopback, where all ranks are on one host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("", 0), family=family) as found:
        free = found.getsockname()[1]
    address = f"[{host}]:{free}" if ":" in host else f"{host}:{free}"
    address = broadcast_object(address, 0, name="address of jax.distributed")
    if not hasattr(jax.distributed, "is_initialized"):  # JAX 0.5, which has no collectives of CPUs by default
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        # By default JAX listens on all interfaces.
        jax.distributed.initialize(
            address, size(), rank(), initialization_timeout=int(timeout), coordinator_bind_address=address
        )
    except RuntimeError as error:
        raise RingError(f"rank {rank()}: jax.distributed has not started: {error}") from error
    _started[0] = True
