"""A key-value store that rank 0 serves to the ranks of other hosts, which prove that they know its key."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

_KEY_BYTES = 32


class _Keys:
    """The keys, each request on them at once."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, request: tuple[Any, ...]) -> Any:
        """The result of one request: the name of an operation and its arguments."""
        operation, *arguments = request
        with self._lock:
            return getattr(self, f"_{operation}")(*arguments)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> bytes:
        return self._values[key]

    def _add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)


def serve() -> str:
    """Serve a new store from this process until it ends; returns ``"host:port key"``, the key in hexadecimal."""
    key = secrets.token_bytes(_KEY_BYTES)
    listener = Listener(("", 0), backlog=1024, authkey=key)
    keys = _Keys()

    def accept() -> None:
        while True:
            with suppress(AuthenticationError, EOFError, OSError):
                caller = listener.accept()
                threading.Thread(target=_answer, args=(caller, keys), name="ring-store", daemon=True).start()

    threading.Thread(target=accept, name="ring-store", daemon=True).start()
    assert isinstance(listener.address, tuple)
    return f"{socket.gethostname()}:{listener.address[1]} {key.hex()}"


def _answer(caller: Any, keys: _Keys) -> None:
    with caller, suppress(EOFError, OSError):
        while True:
            caller.send(keys.answer(caller.recv()))


class ServedStore:
    """The client: what `RunStore` needs of a store, over one connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            self._connection.send(request)
            return self._connection.recv()

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> Any:
        """The value of a key that is set."""
        return self._ask("get", key)

    def add(self, key: str, value: int) -> Any:
        """Add to a number."""
        return self._ask("add", key, value)

    def check(self, keys: Sequence[str]) -> Any:
        """Whether all are set."""
        return self._ask("check", list(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Any:
        """Set ``key`` if it is ``expected``."""
        return self._ask("compare_set", key, _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> Any:
        """Forget ``key``."""
        return self._ask("delete_key", key)

    def num_keys(self) -> Any:
        """How many keys are set."""
        return self._ask("num_keys")


def connect(address: str, key: bytes) -> ServedStore:
    """The store that ``address`` serves."""
    host, _, port = address.rpartition(":")
    return ServedStore(Client((host, int(port)), authkey=key))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
