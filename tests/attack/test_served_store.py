"""The store that rank 0 serves to ranks of other hosts, against programs that know no key."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.waiting import LIMIT
from ring_notebook.torch.process_group.run_store import connect

SERVER = """
import sys
from ring_notebook.torch.process_group.run_store import serve
print(serve(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, bytes]]:
    """Address and key of a store, which lasts as long as its process."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address, key = server.stdout.readline().split()
        yield address, bytes.fromhex(key)
        server.stdin.close()


@pytest.mark.slow
def test_a_stranger_who_connects_and_says_nothing_holds_nobody_up(served: tuple[str, bytes]) -> None:
    host, _, port = served[0].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger, ThreadPoolExecutor(1) as pool:
        connected = pool.submit(connect, *served)
        try:
            store = connected.result(LIMIT)
        finally:
            stranger.shutdown(socket.SHUT_RDWR)
    store.set("name", "value")
    assert store.get("name") == b"value"


def test_a_stranger_with_another_key(served: tuple[str, bytes]) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(served[0], bytes(32))
