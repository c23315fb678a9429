"""JAX's own runtime over the ranks of a job, beside our collectives.

Each program over devices of several ranks has a gate before it: a barrier of ours that compares what the ranks start,
and ends the wait for a rank that does not come. XLA would wait forever.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import jax
from ring_notebook.api.basics import rank, size
from ring_notebook.api.objects import broadcast_object
from ring_notebook.config import config
from ring_notebook.core import other_waits, world
from ring_notebook.core.buffers import from_memoryview
from ring_notebook.core.communicator import Communicator, receive, send
from ring_notebook.errors import RingError
from ring_notebook.jax import jax_private
from ring_notebook.text.words import first_characters

_started = [False]  # JAX 0.5 does not say
_COLLECTIVE = re.compile(
    r" = (?P<type>\S.*?) (?P<kind>all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|"
    r"ragged-all-to-all|reduce-scatter)(?:-start)?\("
    r"(?:.*?(?P<groups>(?:replica_groups|source_target_pairs)=\S+))?(?:.*?to_apply=(?P<applies>[^\s,]+))?"
)
"""A collective instruction of XLA, and the function that reduces its values."""
_FUNCTION = re.compile(r"^(?P<name>\S+) \(.*\{\n(?:  (?!ROOT).*\n)*  ROOT \S+ = \S+ (?P<kind>[\w-]+)\(", re.MULTILINE)
"""A function of XLA, and the instruction that makes its result."""
_LAYOUT = re.compile(r"\{[^}]*\}")
_CARD = struct.Struct("=QQq")
_CARD_TAG = 1 << 30
"""Added to a number made of the members' ranks, gives the tag of the messages that form a group."""


def start_distributed(timeout: float = 300.0) -> None:
    """Start ``jax.distributed`` over all ranks: ``jax.devices()`` are then those of all of them.

    All ranks call this after ``init()`` and before they compute with JAX, which fixes its devices; in a notebook, once
    after the ranks have started. A ``jax.sharding.Mesh`` of these devices works as JAX's documentation says, and our
    collectives work on arrays of each rank's own devices. Before a program of that mesh starts, its ranks compare its
    name and its collectives: if a rank starts another program, or none, the wait ends as in our collectives. A rank
    that dies ends the job, or is named in the cell, as without JAX's runtime. JAX does not encrypt what it sends:
    between hosts use a network that nobody else reaches. Beyond Horovod.

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
    if config().gate == "on":
        jax_private.begin_programs_with(_gate_before)


class _Gates:
    """The communicators of the ranks of programs, new in each generation."""

    def __init__(self) -> None:
        self._world: world.World | None = None
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    def enter(self, ranks: tuple[int, ...], name: str) -> None:
        """Return when all of ``ranks`` are about to start the program ``name``."""
        if not world.is_initialized():
            return
        now = world.current()
        if (now.rank, now.size) != (jax.process_index(), jax.process_count()):  # other ranks than when JAX was started
            return
        if self._world is not now:
            self._world, self._communicators = now, {}
        with other_waits.own_words():
            if ranks not in self._communicators:
                self._communicators[ranks] = self._form(now.communicator, ranks, name)
            self._communicators[ranks].barrier(name=name)

    def _form(self, whole: Communicator, ranks: tuple[int, ...], name: str) -> Communicator:
        if len(ranks) == whole.size:
            jax.effects_barrier()  # collectives in running programs match by order too
            whole.barrier(name=name)  # so that waiting ranks show its name
            communicator = whole.group(ranks)
        else:
            communicator = whole.group_of_members(ranks, lambda card: _exchange(whole, ranks, card))
        assert communicator is not None
        communicator.match_in_order()
        return communicator


_gates = _Gates()


def _exchange(whole: Communicator, ranks: tuple[int, ...], card: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Exchange cards among ``ranks``, by messages: no other rank takes part."""
    tag = _CARD_TAG + crc32(repr(ranks).encode()) % _CARD_TAG
    cards = [bytearray(_CARD.pack(*card)) for _ in ranks]
    others = [(one, theirs) for one, theirs in zip(ranks, cards, strict=True) if one != whole.rank]
    for move in (send, receive):
        for other, memory in others:
            move(whole, from_memoryview(memoryview(memory)), other, tag=tag)
    return [_CARD.unpack(one) for one in cards]


def _gate_before(program: Any) -> Callable[[], object] | None:
    """What to call before a program starts; None for a program without collectives of several ranks."""
    try:
        ranks = tuple(sorted({device.process_index for device in jax_private.devices_of(program)}))
        if len(ranks) < 2 or not (name := _title(program.name, jax_private.text_of(program))):
            return None
    except AttributeError:  # of a JAX that is not known yet
        return None
    return lambda: _gates.enter(ranks, name)


def _title(name: str, text: str) -> str:
    """What ranks compare of a program: "jax.jit(step): all-reduce add f32[3]", or also a hash of all its collectives.

    Empty where it has no collective.
    """
    made_by = {one["name"]: one["kind"] for one in _FUNCTION.finditer(text)}
    found = [
        (
            f"{one['kind']} {made_by.get(one['applies'], '')}".strip(),
            first_characters(_LAYOUT.sub("", one["type"]), 40),
            one["groups"],
        )
        for one in _COLLECTIVE.finditer(text)
    ]
    if not found:
        return ""
    more = f" and {len(found) - 1} more, {crc32(repr(found).encode()):08x}" if len(found) > 1 else ""
    return f"jax.{name}: {found[0][0]} {found[0][1]}{more}"
