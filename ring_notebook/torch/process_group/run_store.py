"""The key-value store in which ranks of one run find each other. On one host it needs no port, and no wait hangs.

Between hosts rank 0 serves it to ranks that prove that they know its key. ``init_method="env://"``, the default of
torch.distributed, uses it for ranks that we started.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveTimeout
from ring_notebook.machine.os_calls import memory_file
from ring_notebook.rank.known_callers import Caller, KnownCallers, call
from ring_notebook.rank.rank_variables import is_of_this_job
from ring_notebook.torch.tensors import buffer_of

_SHORTEST, _LONGEST = 0.0005, 0.01  # seconds between two looks for a key
_BETWEEN_LOOKS = 0.25  # seconds between two looks at the other ranks
_CARD = 512  # bytes
_KEY_BYTES = 32
# Keeps the Python side of the store alive, because torch.distributed holds only the C++ side, which calls it.
_in_use: RunStore | None = None


class RunStore(c10d.Store):
    """A store whose waits end when the generation ends, a rank fails or leaves, at an interrupt, or after the timeout.

    C++ calls it too: Gloo finds its ranks through it. ``inner`` holds the keys.
    """

    def __init__(self, inner: Any, timeout: timedelta) -> None:
        super().__init__()
        self._inner = inner
        self._timeout = timeout
        self.generation = world.current()

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``, even if it was set before."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is set."""
        self.wait([key])
        value: bytes = self._inner.get(key)
        return value

    def add(self, key: str, value: int) -> int:
        """Add to the number that ``key`` holds, 0 before; returns the sum."""
        total: int = self._inner.add(key, value)
        return total

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set ``key`` if it is ``expected_value``; returns its value afterwards."""
        value: bytes = self._inner.compare_set(key, expected_value, desired_value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return bool(self._inner.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; returns whether it was set."""
        return bool(self._inner.delete_key(key))

    deleteKey = delete_key  # noqa: N815  C++ asks for it by this name

    def num_keys(self) -> int:
        """How many keys are set."""
        count: int = self._inner.num_keys()
        return count

    getNumKeys = num_keys  # noqa: N815

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout = timeout

    def clone(self) -> RunStore:
        """This store: any thread may use it."""
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are set.

        Raises CollectiveTimeout after ``timeout``, CollectiveAborted when a rank of the generation failed or left, or
        the generation ended, and KeyboardInterrupt.
        """
        limit = self._timeout if timeout is None else timeout
        begin = time.monotonic()
        generation, look, pause = world.current() if world.is_initialized() else None, begin, _SHORTEST
        while not self.check(keys):
            if time.monotonic() - look > _BETWEEN_LOOKS:
                look = time.monotonic()
                _check_generation(generation, f"{', '.join(keys)} in torch.distributed's store")
            if time.monotonic() - begin > limit.total_seconds():
                raise CollectiveTimeout(
                    f"rank {_rank()}: waited {limit.total_seconds():g} s for {', '.join(keys)} of another rank in "
                    "torch.distributed's store; call init_process_group and new_group on every rank of the group"
                )
            time.sleep(pause)
            pause = min(_LONGEST, 2 * pause)


def _check_generation(generation: world.World | None, waits_for: str) -> None:
    """Raise CollectiveAborted if ``generation``, in which a wait began, has ended, or a rank of it failed or left.

    ``waits_for`` completes "rank 0 waits for".
    """
    if generation is None or not world.is_open(generation):
        raise CollectiveAborted(f"the run ended while this process waited for {waits_for}")
    communicator = generation.communicator
    if not communicator.aborted:
        gone = [entry["rank"] for entry in communicator.snapshot() if entry["state"] == "left"]
        if gone:
            communicator.abort(
                f"rank {gone[0]} has left (its cell or script ended) while rank {generation.rank} waits for {waits_for}"
            )
    if communicator.aborted:
        communicator.barrier()  # raises with the reason


class _MemoryStore:
    """A file store over a descriptor of this process, which it closes.

    torch's store opens the path again at every look, and when it ends, so the descriptor is closed after that.
    """

    def __init__(self, descriptor: int) -> None:
        self._held = [dist.FileStore(f"/proc/{os.getpid()}/fd/{descriptor}")]  # type: ignore[attr-defined]
        weakref.finalize(self, self._end, self._held, descriptor)

    def __getattr__(self, operation: str) -> Any:
        return getattr(self._held[0], operation)

    @staticmethod
    def _end(held: list[Any], descriptor: int) -> None:
        held.clear()
        os.close(descriptor)


def _rank() -> int:
    return world.current().rank if world.is_initialized() else 0


def run_store(timeout: timedelta) -> RunStore:
    """A new store for all ranks of the open generation; all of them call this.

    On one host it is a file in memory without a name: nobody else can open it, and it disappears with the ranks.
    Between hosts rank 0 serves it to processes that know a key, which only the ranks get.
    """
    global _in_use
    _in_use = RunStore(keys_of_ranks(), timeout)
    return _in_use


def is_of_open_generation(store: c10d.Store) -> bool:
    """Whether ``store``, below torch's prefixes, is what `run_store` made in the open generation, aborted or not."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return isinstance(store, RunStore) and world.is_open(store.generation)


def keys_of_ranks() -> Any:
    """A new store for all ranks of the open generation, which may be used after it; all of them call this.

    It has ``set``, ``get`` and ``check`` of `RunStore`, for any thread, and never waits.
    """
    current = world.current()
    if len(set(current.hosts)) > 1 or len(set(current.communicator._native.host_of)) > 1:
        return _served_store()
    own = memory_file("torch-store") if current.rank == 0 else -1
    pid, descriptor = map(int, _from_rank_0(f"{os.getpid()} {own}").split())
    if own < 0:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    current.communicator.barrier()  # all have opened rank 0's descriptor, which it may now close
    return _MemoryStore(own)


def _served_store() -> Any:
    current = world.current()
    address, key = _from_rank_0(serve() if current.rank == 0 else "").split()
    return connect(address, bytes.fromhex(key))


def _from_rank_0(text: str) -> str:
    """Broadcast a short text from rank 0."""
    card = torch.zeros(_CARD, dtype=torch.uint8, device="cpu")
    card[: len(text)] = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)[: len(text)]
    memory = buffer_of(card)
    world.current().communicator.broadcast(memory, memory, 0)
    return bytes(card.tolist()).rstrip(b"\0").decode()


def serve() -> str:
    """Serve a new store from this process until it ends; returns ``"host:port key"``, the key in hexadecimal."""
    key = secrets.token_bytes(_KEY_BYTES)
    store = dist.HashStore()  # type: ignore[attr-defined]  # left out of torch's stubs

    def answer(caller: Caller) -> None:
        while True:
            operation, *arguments = caller.recv()
            caller.send(getattr(store, operation)(*arguments))

    port = KnownCallers(("", 0), key, answer).address.rpartition(":")[2]
    return f"{socket.gethostname()}:{port} {key.hex()}"


class ServedStore:
    """The client: the operations that `RunStore` needs, over one connection."""

    def __init__(self, connection: Caller) -> None:
        self._connection = connection
        weakref.finalize(self, connection.close)
        self._lock = threading.Lock()

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return partial(self._ask, operation)

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            self._connection.send(request)
            return self._connection.recv()


def connect(address: str, key: bytes) -> ServedStore:
    """The store that ``address`` serves. Raises ssl.SSLError if it has another key."""
    return ServedStore(call(address, key))


Found = Iterator[tuple[c10d.Store, int, int]]


def rendezvous(
    url: str, otherwise: Callable[..., Found], timeout: timedelta = c10d.default_pg_timeout, **kwargs: Any
) -> Found:
    """A handler for torch's rendezvous: yields the store, and the rank and size of this process.

    Ranks of our job or run get a `RunStore`; for others, such as torchrun's, ``otherwise`` decides.
    """
    query = dict(parse_qsl(urlparse(url).query))
    rank = int(query.get("rank", os.environ.get("RANK", -1)))
    size = int(query.get("world_size", os.environ.get("WORLD_SIZE", -1)))
    if not is_of_this_job(rank, size):
        yield from otherwise(url, timeout=timeout, **kwargs)
        return
    if not world.is_initialized() or world.is_aborted():
        world.init()
    import_module("ring_notebook.torch.process_group.gate").install()  # which imports this module
    yield run_store(timeout), rank, size
    raise RuntimeError("a second rendezvous needs a new init_process_group")
