"""Tests on two hosts: they need root and iproute2, and say so where these are missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.two_hosts import TwoHosts, hosts_or_skip


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts joined by a link of 1 Gbit/s."""
    yield from hosts_or_skip()
