"""Ports are found in what Gloo puts into the store, wherever they stand in it."""

from __future__ import annotations

import socket
import struct

from ring_notebook.torch.process_group.stores.listening_ports import forget_ports, listening_ports, note_addresses

IPV4 = struct.pack("=H", socket.AF_INET) + (40_000).to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
IPV6 = struct.pack("=H", socket.AF_INET6) + (40_001).to_bytes(2, "big") + bytes(4) + socket.inet_pton(
    socket.AF_INET6, "fe80::1"
) + bytes(4)  # fmt: skip


def test_ports_of_addresses() -> None:
    forget_ports()
    note_addresses(b"\x02\0\0\0\0\0\0\0host" + IPV4 + b"\xff" * 9)
    note_addresses(b"x" + IPV6)
    assert listening_ports() == {40_000, 40_001}
    forget_ports()
    assert listening_ports() == set()


def test_values_without_addresses() -> None:
    forget_ports()
    for value in ("16 3 4", b"1", bytes(200), b"\x02\x00\x9c\x40 and no address"):
        note_addresses(value)
    assert listening_ports() == set()
